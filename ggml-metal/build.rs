//! With `dynamic-backends`, puts ggml's shared libraries beside the program that cargo builds. The sys crate places
//! the names that the linker wants, not the versioned ones that the program asks for when it starts, nor the backends.

use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_DYNAMIC_BACKENDS").is_none() {
        return;
    }
    // The sys crate tells where its CMake build installed: PREFIX/lib/cmake.
    let cmake = std::env::var_os("DEP_LLAMA_GGML_CMAKE_DIR").map(PathBuf::from);
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from);
    let (Some(cmake), Some(out)) = (cmake, out) else {
        println!("cargo:warning=ggml's libraries were not found; copy them beside the program");
        return;
    };
    // OUT_DIR is PROFILE/build/NAME/out.
    let (Some(lib), Some(profile)) = (cmake.parent(), out.ancestors().nth(3)) else {
        return;
    };
    let prefix = lib.parent().unwrap_or(lib);
    for dir in [lib, &prefix.join("bin"), &prefix.join("backends")] {
        for file in libraries(dir) {
            for target in [profile.to_owned(), profile.join("deps")] {
                let name = file.file_name().unwrap_or_default();
                if let Err(error) = replace(&file, &target.join(name)) {
                    println!("cargo:warning=copying {}: {error}", file.display());
                }
            }
        }
    }
}

/// Shared libraries in a folder, by whatever of their names.
fn libraries(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let is_library = |path: &PathBuf| {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        name.starts_with("lib") && (name.contains(".so") || name.ends_with(".dylib"))
    };
    files.filter(is_library).collect()
}

/// Copies over an older file; a library that is in use keeps its old content.
fn replace(from: &Path, to: &Path) -> std::io::Result<()> {
    if to.exists() {
        fs::remove_file(to)?;
    }
    fs::copy(from, to).map(drop)
}
