//! Values as Python writes them: floats, `json.dumps` and `strftime`.
//!
//! Templates are written against Jinja2, so a rendering equals the published one only if these agree
//! with Python to the character. Knows nothing about templates beyond the engine's value type.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Deepest nesting that `tojson` follows; JSON input is limited to 128 levels when it is parsed.
const MAX_JSON_DEPTH: usize = 256;

/// Widest indentation that `tojson` accepts, so that a number in a template cannot fill the memory.
const MAX_JSON_INDENT: usize = 16;

/// The float inside a value, if it is one.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    let is_float = value.is_number() && !value.is_integer();
    is_float
        .then(|| f64::try_from(value.clone()).ok())
        .flatten()
}

/// Python's `repr` of a float: shortest digits, an exponent below 1e-4 and from 1e16 on.
pub(super) fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => format!("{value:?}"),
    }
}

/// Python's `strftime` in the C locale, for a time in seconds since 1970; unknown directives stay.
pub(super) fn strftime(format: &str, seconds: u64) -> String {
    const DAYS: [&str; 7] = [
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
        "Thursday",
        "Friday",
        "Saturday",
    ];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let weekday = DAYS[(days as usize + 4) % 7];
    let (year, month, day, day_of_year) = civil(days);
    let month_name = MONTHS[month as usize - 1];

    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let rest = characters.as_str();
        let bare = rest.starts_with('-');
        let directive = rest.chars().nth(usize::from(bare));
        let number = |value: u64, width: usize| {
            if bare {
                value.to_string()
            } else {
                format!("{value:0width$}")
            }
        };
        let replacement = match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') => format!("{day:2}"),
            Some('j') => number(day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number((hour + 11) % 12 + 1, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            _ => {
                text.push('%');
                continue;
            }
        };
        text.push_str(&replacement);
        characters.nth(usize::from(bare));
    }
    text
}

/// Year, month, day of the month and day of the year of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // The calendar repeats every 400 years, so the walk below is short for any time.
    let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = left + 1;
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1, day_of_year)
}

/// Python's `json.dumps`, with the arguments that Hugging Face's filter takes.
pub(super) fn tojson(state: &State, value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    if indent.is_some_and(|indent| indent > MAX_JSON_INDENT) {
        return Err(invalid(format!(
            "`indent` of `tojson` is more than {MAX_JSON_INDENT}"
        )));
    }
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let separators = match separators.as_deref() {
        None if indent.is_some() => [",", ": "],
        None => [", ", ": "],
        Some([item, key]) => [item.as_str(), key.as_str()],
        Some(_) => return Err(invalid("`separators` of `tojson` is not a pair".to_owned())),
    };
    let ascii = arguments
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    let sort = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    arguments.assert_all_used()?;
    let mut writer = JsonWriter {
        state,
        out: String::new(),
        charged: 0,
        indent,
        separators,
        ascii,
        sort,
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct JsonWriter<'a> {
    state: &'a State<'a, 'a>,
    out: String,
    charged: usize, // bytes of `out` paid for
    indent: Option<usize>,
    separators: [&'a str; 2], // between items, and between key and value
    ascii: bool,
    sort: bool,
}

impl JsonWriter<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_JSON_DEPTH {
            return Err(invalid(format!(
                "a value for `tojson` is nested deeper than {MAX_JSON_DEPTH} levels"
            )));
        }
        // Pay while writing: a small value that holds itself many times over has a huge text.
        self.state
            .consume_fuel(1 + (self.out.len() - self.charged) as u64 / 64)?;
        self.charged = self.out.len();
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match as_float(value) {
                Some(float) if float.is_nan() => self.out.push_str("NaN"),
                Some(float) if float.is_infinite() => {
                    self.out
                        .push_str(if float > 0.0 { "Infinity" } else { "-Infinity" });
                }
                Some(float) => self.out.push_str(&float_text(float)),
                None => self.out.push_str(&value.to_string()),
            },
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.items('[', ']', value.try_iter()?, depth, |writer, item| {
                    writer.value(&item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.items('{', '}', keys.into_iter(), depth, |writer, key| {
                    writer.key(&key)?;
                    writer.out.push_str(writer.separators[1]);
                    writer.value(&value.get_item(&key)?, depth + 1)
                })?;
            }
            kind => {
                return Err(invalid(format!(
                    "a value of type {kind} cannot be written as JSON"
                )));
            }
        }
        Ok(())
    }

    fn items(
        &mut self,
        open: char,
        close: char,
        items: impl Iterator<Item = Value>,
        depth: usize,
        mut write: impl FnMut(&mut Self, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let mut empty = true;
        for item in items {
            if !empty {
                self.out.push_str(self.separators[0]);
            }
            empty = false;
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    /// Keys that are not strings are quoted, as Python does with numbers, booleans and none.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        if let Some(key) = key.as_str() {
            self.string(key);
            return Ok(());
        }
        self.out.push('"');
        self.value(key, MAX_JSON_DEPTH)?;
        self.out.push('"');
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// The error of an operation that a template should not have tried.
pub(super) fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strftime_agrees_with_python() {
        let format = "%Y-%m-%d %H:%M:%S|%-d %b %y|%A %a, %B|%j|%I %p|%e|%-I|%F %T|%% %Q %";
        for (seconds, expected) in [
            (
                0,
                "1970-01-01 00:00:00|1 Jan 70|Thursday Thu, January|001|12 AM| 1|12|1970-01-01 00:00:00|% %Q %",
            ),
            (
                1_709_251_199,
                "2024-02-29 23:59:59|29 Feb 24|Thursday Thu, February|060|11 PM|29|11|2024-02-29 23:59:59|% %Q %",
            ),
            (
                4_107_542_400,
                "2100-03-01 00:00:00|1 Mar 00|Monday Mon, March|060|12 AM| 1|12|2100-03-01 00:00:00|% %Q %",
            ),
            (
                1_735_646_400,
                "2024-12-31 12:00:00|31 Dec 24|Tuesday Tue, December|366|12 PM|31|12|2024-12-31 12:00:00|% %Q %",
            ),
        ] {
            assert_eq!(strftime(format, seconds), expected);
        }
        assert!(strftime("%Y", u64::MAX).len() > 8);
    }

    #[test]
    fn floats_are_written_as_python_does() {
        for (value, expected) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (123_456_789.125, "123456789.125"),
            (9_999_999_999_999_998.0, "9999999999999998.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float_text(value), expected);
        }
    }
}
