//! Hugging Face checkpoints in memory: read, changed, written again.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// A tensor with its bytes.
#[derive(Clone, Debug)]
pub struct St {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl St {
    pub fn new(name: &str, dtype: &str, shape: &[usize], data: Vec<u8>) -> Self {
        Self {
            name: name.to_owned(),
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            data,
        }
    }

    /// The values of a BF16 or F32 tensor.
    pub fn floats(&self) -> Vec<f32> {
        match self.dtype.as_str() {
            "BF16" => self
                .data
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                .collect(),
            "F32" => self
                .data
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect(),
            other => panic!("{} is {other}", self.name),
        }
    }

    /// The same tensor with other values, as F32.
    pub fn with_floats(&self, values: &[f32]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(&self.name, "F32", &self.shape, data)
    }

    /// The same tensor with other values, cut to BF16.
    pub fn with_bf16(&self, values: &[f32]) -> Self {
        let data = values
            .iter()
            .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes());
        Self::new(&self.name, "BF16", &self.shape, data.collect())
    }
}

/// The bytes of a safetensors file.
pub fn file_bytes(tensors: &[St]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for t in tensors {
        let begin = data.len();
        data.extend_from_slice(&t.data);
        header.insert(
            t.name.clone(),
            json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()]}),
        );
    }
    raw_file(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with that header, whatever it says.
pub fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

fn read_file(path: &Path) -> Vec<St> {
    let bytes = std::fs::read(path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let data = &bytes[8 + n..];
    let mut out = Vec::new();
    for (name, entry) in header.as_object().unwrap() {
        if name == "__metadata__" {
            continue;
        }
        let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
        let dtype = entry["dtype"].as_str().unwrap();
        out.push(St::new(name, dtype, &shape, data[at(0)..at(1)].to_vec()));
    }
    out
}

/// A checkpoint: its tensors, its settings, and the small files beside them.
#[derive(Clone)]
pub struct Model {
    pub name: String,
    pub config: Value,
    pub tensors: Vec<St>,
    pub files: Vec<(String, Vec<u8>)>,
}

impl Model {
    /// Reads a checkpoint.
    pub fn read(dir: &Path) -> Self {
        let mut model = Self {
            name: dir.file_name().unwrap().to_string_lossy().into_owned(),
            config: Value::Null,
            tensors: Vec::new(),
            files: Vec::new(),
        };
        let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        paths.sort();
        for path in paths {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.ends_with(".safetensors") {
                model.tensors.extend(read_file(&path));
            } else if name == "config.json" {
                model.config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            } else if !name.ends_with("index.json") && !name.ends_with("goldens.json") {
                model.files.push((name, std::fs::read(&path).unwrap()));
            }
        }
        model
    }

    /// Writes it as one file into a folder of its name under `parent`.
    pub fn write(&self, parent: &Path) -> PathBuf {
        let dir = self.write_without_tensors(parent);
        std::fs::write(dir.join("model.safetensors"), file_bytes(&self.tensors)).unwrap();
        dir
    }

    /// Writes everything but the tensors.
    pub fn write_without_tensors(&self, parent: &Path) -> PathBuf {
        let dir = parent.join(&self.name);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        for (name, data) in &self.files {
            std::fs::write(dir.join(name), data).unwrap();
        }
        dir
    }

    /// Writes it as `n` shards of about as many tensors each, with an index if asked.
    pub fn write_shards(&self, parent: &Path, n: usize, index: bool) -> PathBuf {
        let dir = self.write_without_tensors(parent);
        let mut map = serde_json::Map::new();
        for (i, part) in self
            .tensors
            .chunks(self.tensors.len().div_ceil(n))
            .enumerate()
        {
            let name = format!("model-{:05}-of-{n:05}.safetensors", i + 1);
            std::fs::write(dir.join(&name), file_bytes(part)).unwrap();
            for t in part {
                map.insert(t.name.clone(), json!(name));
            }
        }
        if index {
            let index = json!({"metadata": {}, "weight_map": map});
            std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
        dir
    }

    pub fn get(&self, name: &str) -> &St {
        self.tensors.iter().find(|t| t.name == name).unwrap()
    }

    pub fn get_mut(&mut self, name: &str) -> &mut St {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }
}
