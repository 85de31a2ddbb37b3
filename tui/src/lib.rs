//! qrun's terminal interface.

#![forbid(unsafe_code)]
