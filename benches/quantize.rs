//! Quantizing with qrun and with llama.cpp in one process: the same file, the same ggml, the same threads, turn and
//! turn about.
//!
//! `cargo bench --bench quantize -- [-r N] [-t N] [--type TYPE] [--imatrix FILE] [--folder DIR] FILE`
//!
//! Each repetition writes the whole file with one and then with the other; they take turns at going first. The file is
//! read once before, so that both find it in memory. Results go to DIR and are removed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Parser;
use convert::imatrix::Imatrix;
use convert::parts;
use convert::quantize::{Options, Plan};
use convert::recipe::{FileType, Overrides};
use ggml_metal::peer::PeerQuantize;
use ggml_metal::performance_cores;

/// The importance matrix' name in the files.
const NAME: &str = "imatrix.gguf";

#[derive(Parser)]
struct Args {
    /// GGUF file of F16, BF16 or F32
    file: PathBuf,
    /// What to make of it
    #[arg(long = "type", default_value = "Q4_K_M")]
    file_type: String,
    /// Repetitions
    #[arg(short, long, default_value_t = 3)]
    repetitions: usize,
    /// Threads [default: performance cores]
    #[arg(short, long)]
    threads: Option<usize>,
    /// Importance of the columns
    #[arg(long)]
    imatrix: Option<PathBuf>,
    /// Where the results go [default: beside the file]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// What `cargo bench` passes
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let args = Args::parse();
    let file_type = FileType::from_name(&args.file_type).expect("no such type");
    let n_threads = args.threads.unwrap_or_else(performance_cores);
    let beside = args.file.parent().unwrap().to_owned();
    let folder = tempfile::tempdir_in(args.folder.unwrap_or(beside)).unwrap();
    let (a, b) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    let bytes = std::io::copy(
        &mut std::fs::File::open(&args.file).unwrap(),
        &mut std::io::sink(),
    )
    .unwrap();
    println!(
        "qrun {} | {n_threads} threads | {} ({:.2} GB) to {}",
        *qrun::VERSION,
        args.file.file_name().unwrap().display(),
        bytes as f64 / 1e9,
        file_type.name()
    );
    let imatrix = args.imatrix.as_deref().map(|f| Imatrix::read(f).unwrap());
    let input = &args.file;
    let ours_once = || ours_once(input, &a, file_type, imatrix.as_ref(), n_threads);
    let theirs_once = || theirs_once(input, &b, file_type, imatrix.as_ref(), n_threads);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for i in 0..args.repetitions {
        if i % 2 == 0 {
            ours.push(ours_once());
            theirs.push(theirs_once());
        } else {
            theirs.push(theirs_once());
            ours.push(ours_once());
        }
        println!(
            "  qrun {:.2} s, llama.cpp {:.2} s, ratio {:.3}",
            ours[i],
            theirs[i],
            ours[i] / theirs[i]
        );
    }
    let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(a, b)| a / b).collect();
    let spread = |v: &[f64]| {
        let low = v.iter().copied().fold(f64::INFINITY, f64::min);
        let high = v.iter().copied().fold(0.0, f64::max);
        format!("{:.3} ({low:.3} to {high:.3})", median(v))
    };
    println!(
        "| seconds, median (smallest to largest) | qrun | llama.cpp | qrun / llama.cpp |\n| --- | --- | --- | --- |\n\
         | {} | {} | {} | {} |",
        file_type.name(),
        spread(&ours),
        spread(&theirs),
        spread(&ratios)
    );
    println!(
        "files are {}",
        if same(&a, &b) { "equal" } else { "DIFFERENT" }
    );
}

fn ours_once(
    input: &Path,
    output: &Path,
    file_type: FileType,
    imatrix: Option<&Imatrix>,
    n_threads: usize,
) -> f64 {
    let _ = std::fs::remove_file(output);
    let options = Options {
        file_type,
        overrides: Overrides::default(),
        imatrix: imatrix.map(|i| (NAME.to_owned(), i.clone())),
        allow_requantize: false,
        n_threads,
    };
    let start = Instant::now();
    let files = parts::open(input).unwrap();
    let plan = Plan::new(&files, &options).unwrap();
    plan.write(output, &mut |_, _| true).unwrap();
    start.elapsed().as_secs_f64()
}

fn theirs_once(
    input: &Path,
    output: &Path,
    file_type: FileType,
    imatrix: Option<&Imatrix>,
    n_threads: usize,
) -> f64 {
    let _ = std::fs::remove_file(output);
    let entries = imatrix.map(|i| &i.entries).into_iter().flatten();
    let means: Vec<_> = entries.map(|(name, e)| (name.clone(), e.means())).collect();
    // What both write into the file, so that the files can be compared.
    let (mut texts, mut numbers) = (Vec::new(), Vec::new());
    if let Some(imatrix) = imatrix {
        texts.push(("quantize.imatrix.file", NAME));
        if let Some(dataset) = imatrix.datasets.first() {
            texts.push(("quantize.imatrix.dataset", dataset));
        }
        numbers.push(("quantize.imatrix.entries_count", means.len() as u32));
        numbers.push(("quantize.imatrix.chunks_count", imatrix.n_chunks));
    }
    let quantize = PeerQuantize {
        imatrix: &means,
        texts: &texts,
        numbers: &numbers,
        ..PeerQuantize::new(file_type.number(), n_threads)
    };
    let start = Instant::now();
    quantize.run(input, output).unwrap();
    start.elapsed().as_secs_f64()
}

fn same(a: &Path, b: &Path) -> bool {
    std::fs::read(a).unwrap() == std::fs::read(b).unwrap()
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
