//! Which type each tensor gets: llama.cpp's mixtures for the Qwen 3.5 family.
//!
//! The facts are those of `llama-quant.cpp` (ggml 0.26): norms, routers, convolutions and vectors stay as they are;
//! the output matrix, values, down projections and, in some mixtures, other matrices get more bits than the rest.

use anyhow::{Result, bail, ensure};
use ggml_metal::{DType, Gguf, Value};
use regex::Regex;

/// What `quantize` turns a model into, named and numbered as in llama.cpp (`general.file_type`).
#[allow(missing_docs, non_camel_case_types)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q8_0 = 7,
    Q5_0 = 8,
    Q5_1 = 9,
    Q2_K = 10,
    Q3_K_S = 11,
    Q3_K_M = 12,
    Q3_K_L = 13,
    Q4_K_S = 14,
    Q4_K_M = 15,
    Q5_K_S = 16,
    Q5_K_M = 17,
    Q6_K = 18,
    IQ2_XXS = 19,
    IQ2_XS = 20,
    Q2_K_S = 21,
    IQ3_XS = 22,
    IQ3_XXS = 23,
    IQ1_S = 24,
    IQ4_NL = 25,
    IQ3_S = 26,
    IQ3_M = 27,
    IQ2_S = 28,
    IQ2_M = 29,
    IQ4_XS = 30,
    IQ1_M = 31,
    BF16 = 32,
}

use FileType as F;

impl FileType {
    /// All of them, with most bits first.
    pub const ALL: [Self; 30] = [
        F::F32,
        F::F16,
        F::BF16,
        F::Q8_0,
        F::Q6_K,
        F::Q5_K_M,
        F::Q5_K_S,
        F::Q5_1,
        F::Q5_0,
        F::Q4_K_M,
        F::Q4_K_S,
        F::Q4_1,
        F::Q4_0,
        F::IQ4_NL,
        F::IQ4_XS,
        F::Q3_K_L,
        F::Q3_K_M,
        F::Q3_K_S,
        F::IQ3_M,
        F::IQ3_S,
        F::IQ3_XS,
        F::IQ3_XXS,
        F::Q2_K,
        F::Q2_K_S,
        F::IQ2_M,
        F::IQ2_S,
        F::IQ2_XS,
        F::IQ2_XXS,
        F::IQ1_M,
        F::IQ1_S,
    ];

    /// The name, such as `Q4_K_M`.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// The type with that name, in any case. `Q3_K`, `Q4_K` and `Q5_K` are the middle mixtures.
    pub fn from_name(name: &str) -> Option<Self> {
        let middle = ["Q3_K", "Q4_K", "Q5_K"]
            .iter()
            .any(|n| n.eq_ignore_ascii_case(name));
        let name = if middle {
            format!("{name}_M")
        } else {
            name.to_owned()
        };
        Self::ALL
            .into_iter()
            .find(|t| t.name().eq_ignore_ascii_case(&name))
    }

    /// Its number in `general.file_type`.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The type that most matrices get.
    pub fn base(self) -> DType {
        match self {
            F::F32 => DType::F32,
            F::F16 => DType::F16,
            F::BF16 => DType::BF16,
            F::Q4_0 => DType::Q4_0,
            F::Q4_1 => DType::Q4_1,
            F::Q5_0 => DType::Q5_0,
            F::Q5_1 => DType::Q5_1,
            F::Q8_0 => DType::Q8_0,
            F::Q2_K | F::Q2_K_S => DType::Q2_K,
            F::Q3_K_S | F::Q3_K_M | F::Q3_K_L => DType::Q3_K,
            F::Q4_K_S | F::Q4_K_M => DType::Q4_K,
            F::Q5_K_S | F::Q5_K_M => DType::Q5_K,
            F::Q6_K => DType::Q6_K,
            F::IQ1_S => DType::IQ1_S,
            F::IQ1_M => DType::IQ1_M,
            F::IQ2_XXS => DType::IQ2_XXS,
            F::IQ2_XS | F::IQ2_S => DType::IQ2_XS,
            F::IQ2_M => DType::IQ2_S,
            F::IQ3_XXS => DType::IQ3_XXS,
            F::IQ3_XS | F::IQ3_S | F::IQ3_M => DType::IQ3_S,
            F::IQ4_NL => DType::IQ4_NL,
            F::IQ4_XS => DType::IQ4_XS,
        }
    }

    /// The mixtures around two bits and below, which have rules of their own.
    fn is_lowest(self) -> bool {
        matches!(
            self,
            F::IQ1_S | F::IQ1_M | F::IQ2_XXS | F::IQ2_XS | F::IQ2_S | F::IQ2_M
        )
    }
}

/// The numbers of a model that a recipe depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Layers, those of the MTP head included.
    pub n_layer: usize,
    /// Layers of the MTP head, which come last.
    pub n_mtp: usize,
    /// Experts; 0 in dense models.
    pub n_expert: usize,
    /// Query heads for each key head, in the first layer.
    pub n_gqa: usize,
}

impl Shape {
    /// Reads the numbers from a model's metadata.
    ///
    /// # Errors
    /// When it is not a model of the Qwen 3.5 family, or a number is missing.
    pub fn read(file: &Gguf) -> Result<Self> {
        let path = file.path().display();
        let arch = match file.value("general.architecture") {
            Some(Value::Str(arch)) if ["qwen35", "qwen35moe"].contains(&arch.as_str()) => arch,
            Some(Value::Str(arch)) => bail!(
                "{path}: architecture `{}` is not supported; qrun quantizes `qwen35` and `qwen35moe` models",
                ggml_metal::one_line(&arch)
            ),
            _ => bail!("{path}: has no key `general.architecture`, so it is not a model"),
        };
        // A list holds a number for each layer.
        let int = |key: &str| match file.value(&format!("{arch}.{key}")) {
            Some(Value::Int(n)) => usize::try_from(n).ok(),
            Some(Value::Ints(list)) => list.first().and_then(|&n| usize::try_from(n).ok()),
            _ => None,
        };
        let n_layer = int("block_count").unwrap_or(0);
        ensure!(
            (1..=4096).contains(&n_layer),
            "{path}: key `{arch}.block_count` is missing or no sensible number"
        );
        let n_head = int("attention.head_count").unwrap_or(0);
        let n_head_kv = int("attention.head_count_kv").unwrap_or(n_head);
        Ok(Self {
            n_layer,
            n_mtp: int("nextn_predict_layers").unwrap_or(0).min(n_layer),
            n_expert: int("expert_count").unwrap_or(0),
            n_gqa: n_head.checked_div(n_head_kv).unwrap_or(0),
        })
    }
}

/// What the user asked for besides the recipe.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Types for the tensors whose names match; the first match counts.
    pub tensors: Vec<(Regex, DType)>,
    /// Type of the output matrix, also where it is the token embedding.
    pub output: Option<DType>,
    /// Type of the token embedding.
    pub token_embedding: Option<DType>,
    /// Type of the MTP head's matrices.
    pub mtp: Option<DType>,
}

/// A pattern for tensor names; it may match anywhere in them.
///
/// # Errors
/// When it is not a regular expression; the text says why.
pub fn pattern(text: &str) -> Result<Regex, String> {
    Regex::new(text).map_err(|error| {
        // The last line says what is wrong; those before point at the place.
        let error = error.to_string();
        let reason = error.lines().last().unwrap_or_default().trim();
        let reason = reason.strip_prefix("error: ").unwrap_or(reason);
        format!("`{text}` is not a regular expression: {reason}")
    })
}

/// A tensor to be typed.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Its name.
    pub name: &'a str,
    /// Elements per dimension in ggml order, 1 beyond the last.
    pub shape: [i64; 4],
    /// The type it has.
    pub dtype: DType,
}

/// The order in which llama.cpp goes through tensors and writes them: those outside layers first, then layer by
/// layer, by name.
pub fn order(a: &str, b: &str) -> std::cmp::Ordering {
    (layer_of(a), a).cmp(&(layer_of(b), b))
}

/// The layer in `blk.N.`, if there is one.
pub fn layer_of(name: &str) -> Option<usize> {
    let (number, _) = name.strip_prefix("blk.")?.split_once('.')?;
    number.parse().ok()
}

/// True for tensors that a recipe quantizes: matrices, without norms, routers and convolution kernels.
pub fn is_quantized(name: &str, shape: &[i64; 4]) -> bool {
    let kept = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d"];
    shape[1..].iter().any(|&n| n > 1)
        && name.ends_with("weight")
        && !kept.iter().any(|part| name.contains(part))
}

/// True where a tensor of that name would be ruined by that type without an importance matrix.
pub fn wants_imatrix(name: &str, dtype: DType, file_type: FileType) -> bool {
    let low = [
        DType::IQ1_S,
        DType::IQ1_M,
        DType::IQ2_XXS,
        DType::IQ2_XS,
        DType::IQ2_S,
        DType::IQ3_XXS,
    ];
    !matches!(Role::of(name), Role::Output | Role::TokenEmbd)
        && (low.contains(&dtype) || (dtype == DType::Q2_K && file_type == F::Q2_K_S))
}

/// The type of every tensor, which must come in [`order`].
///
/// # Errors
/// When a tensor's layer is not one of the model's, or a type that was asked for does not fit a tensor's rows.
pub fn types(
    file_type: FileType,
    shape: &Shape,
    tensors: &[Subject],
    overrides: &Overrides,
    has_imatrix: bool,
) -> Result<Vec<DType>> {
    let roles: Vec<Role> = tensors.iter().map(|t| Role::of(t.name)).collect();
    let mut recipe = Recipe {
        file_type,
        shape,
        has_imatrix,
        output: overrides.output,
        tied: !roles.contains(&Role::Output),
        n_values: roles.iter().filter(|r| r.is_value()).count(),
        values_seen: 0,
        downs_seen: 0,
        gates_seen: 0,
        ups_seen: 0,
    };
    let base = file_type.base();
    let mut types = Vec::with_capacity(tensors.len());
    for (tensor, &role) in tensors.iter().zip(&roles) {
        if !is_quantized(tensor.name, &tensor.shape) {
            types.push(tensor.dtype);
            continue;
        }
        let named =
            |(pattern, dtype): &(Regex, DType)| pattern.is_match(tensor.name).then_some(*dtype);
        let in_mtp = layer_of(tensor.name).is_some_and(|il| il + shape.n_mtp >= shape.n_layer);
        let asked = match role {
            Role::TokenEmbd => overrides.token_embedding,
            Role::Output => overrides.output,
            _ => None,
        }
        .or_else(|| overrides.tensors.iter().find_map(named))
        .or(overrides.mtp.filter(|_| in_mtp));
        let wanted = match asked {
            Some(dtype) => dtype,
            None if base.is_quantized() => recipe.mixture(role, tensor)?,
            None => match overrides.output {
                // Without an output matrix the embedding is the output matrix.
                Some(dtype) if role == Role::TokenEmbd && recipe.tied => dtype,
                _ => base,
            },
        };
        types.push(fitting(wanted, tensor.shape[0]));
    }
    Ok(types)
}

/// `dtype`, or where its blocks do not divide rows of `n` a relative with smaller blocks, or F16.
fn fitting(dtype: DType, n: i64) -> DType {
    let fits = |dtype: DType| n % dtype.block_size().max(1) as i64 == 0;
    if fits(dtype) {
        return dtype;
    }
    let smaller = match dtype {
        DType::Q2_K | DType::Q3_K | DType::TQ1_0 | DType::TQ2_0 => DType::Q4_0,
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        DType::Q6_K => DType::Q8_0,
        dtype if dtype.block_size() > 32 => DType::IQ4_NL,
        dtype => dtype,
    };
    if fits(smaller) { smaller } else { DType::F16 }
}

/// What a matrix does, as far as recipes care.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    Output,
    TokenEmbd,
    Qkv,
    Value,
    Key,
    Query,
    AttnOutput,
    Up,
    Gate,
    Down,
    Other,
}

impl Role {
    fn of(name: &str) -> Self {
        let parts = [
            ("attn_qkv.weight", Self::Qkv),
            ("attn_v.weight", Self::Value),
            ("attn_k.weight", Self::Key),
            ("attn_q.weight", Self::Query),
            ("attn_output.weight", Self::AttnOutput),
            ("ffn_up", Self::Up),
            ("ffn_gate", Self::Gate),
            ("ffn_down", Self::Down),
        ];
        match name {
            "output.weight" => Self::Output,
            "token_embd.weight" => Self::TokenEmbd,
            _ => parts
                .iter()
                .find(|(part, _)| name.contains(part))
                .map_or(Self::Other, |(_, role)| *role),
        }
    }

    /// Values, alone or together with queries and keys.
    fn is_value(self) -> bool {
        matches!(self, Self::Value | Self::Qkv)
    }
}

/// A recipe under way: some choices depend on how many matrices of a kind came before.
struct Recipe<'a> {
    file_type: FileType,
    shape: &'a Shape,
    has_imatrix: bool,
    output: Option<DType>,
    /// The token embedding is the output matrix, too.
    tied: bool,
    n_values: usize,
    values_seen: usize,
    downs_seen: usize,
    gates_seen: usize,
    ups_seen: usize,
}

/// The first and the last eighth, and every third between them.
fn more_bits(i: usize, n: usize) -> bool {
    i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
}

impl Recipe<'_> {
    fn mixture(&mut self, role: Role, tensor: &Subject) -> Result<DType> {
        Ok(match role {
            Role::Output => self.output_type(tensor),
            Role::TokenEmbd if self.tied => self.output_type(tensor),
            Role::TokenEmbd => self.embedding_type(),
            _ if self.file_type.is_lowest() => self.lowest(role),
            Role::Value | Role::Qkv => self.value_type(),
            Role::Down => self.down_type(tensor)?,
            Role::Gate => {
                let i = self.layer(self.gates_seen, tensor)?;
                self.gates_seen += 1;
                self.inner_type(i)
            }
            Role::Up => {
                let i = self.layer(self.ups_seen, tensor)?;
                self.ups_seen += 1;
                self.inner_type(i)
            }
            Role::Key | Role::Query => self.key_type(role),
            Role::AttnOutput => self.attn_output_type(),
            Role::Other => self.file_type.base(),
        })
    }

    /// The place of a feed-forward matrix: how many of its kind came before, and with experts, where several lie
    /// in one layer, the layer.
    fn layer(&self, seen: usize, tensor: &Subject) -> Result<usize> {
        if self.shape.n_expert <= 1 {
            return Ok(seen);
        }
        match layer_of(tensor.name) {
            Some(il) if il < self.shape.n_layer => Ok(il),
            _ => bail!(
                "tensor `{}` is in none of the model's {} layers",
                ggml_metal::one_line(tensor.name),
                self.shape.n_layer
            ),
        }
    }

    fn output_type(&self, tensor: &Subject) -> DType {
        let base = self.file_type.base();
        if let Some(dtype) = self.output {
            return dtype;
        }
        match self.file_type {
            _ if tensor.shape[0] % base.block_size() as i64 != 0 => DType::Q8_0,
            F::IQ3_XXS => DType::Q5_K,
            lowest if lowest.is_lowest() => DType::Q5_K,
            F::Q8_0 => DType::Q8_0,
            _ => DType::Q6_K,
        }
    }

    fn embedding_type(&self) -> DType {
        match self.file_type {
            F::IQ1_S | F::IQ1_M | F::IQ2_XXS | F::IQ2_XS => DType::Q2_K,
            F::IQ2_S | F::IQ2_M | F::IQ3_XXS => DType::IQ3_S,
            other => other.base(),
        }
    }

    fn lowest(&mut self, role: Role) -> DType {
        let two_and_a_half = matches!(self.file_type, F::IQ2_S | F::IQ2_M);
        let better = if two_and_a_half {
            DType::IQ3_S
        } else {
            DType::Q2_K
        };
        let base = self.file_type.base();
        match role {
            Role::Value | Role::Qkv => {
                self.values_seen += 1;
                if self.shape.n_gqa >= 4 || self.shape.n_expert >= 4 {
                    DType::Q4_K
                } else {
                    better
                }
            }
            Role::Key if self.shape.n_expert == 8 => DType::Q4_K,
            Role::Down => {
                let early = self.downs_seen < self.shape.n_layer / 8;
                self.downs_seen += 1;
                if early { better } else { base }
            }
            Role::AttnOutput if self.shape.n_expert == 8 => DType::Q5_K,
            Role::AttnOutput => match self.file_type {
                F::IQ1_S | F::IQ1_M => DType::IQ2_XXS,
                F::IQ2_S | F::IQ2_M => DType::IQ3_S,
                _ => base,
            },
            _ => base,
        }
    }

    fn value_type(&mut self) -> DType {
        let (i, n) = (self.values_seen, self.n_values);
        self.values_seen += 1;
        let grouped = self.shape.n_gqa >= 4;
        if self.shape.n_expert == 8 {
            return DType::Q8_0;
        }
        match self.file_type {
            F::Q2_K if !grouped => DType::Q3_K,
            F::Q2_K => DType::Q4_K,
            F::Q2_K_S | F::IQ3_XS | F::IQ3_S | F::IQ3_XXS if grouped => DType::Q4_K,
            F::IQ3_XXS if !self.has_imatrix => DType::IQ3_S,
            F::IQ3_M => DType::Q4_K,
            F::Q3_K_M if i < 2 => DType::Q5_K,
            F::Q3_K_M => DType::Q4_K,
            F::Q3_K_L => DType::Q5_K,
            F::IQ4_NL | F::IQ4_XS if grouped => DType::Q5_K,
            F::Q4_K_M | F::Q5_K_M if more_bits(i, n) => DType::Q6_K,
            F::Q4_K_S if i < 4 => DType::Q5_K,
            other => other.base(),
        }
    }

    fn down_type(&mut self, tensor: &Subject) -> Result<DType> {
        let (i, n) = (self.layer(self.downs_seen, tensor)?, self.shape.n_layer);
        self.downs_seen += 1;
        let early = i < n / 8;
        Ok(match self.file_type {
            F::Q2_K => DType::Q3_K,
            F::Q2_K_S if early => DType::Q4_K,
            F::IQ3_XXS if !self.has_imatrix && early => DType::Q4_K,
            F::IQ3_XXS if !self.has_imatrix => DType::Q3_K,
            F::Q3_K_M if i < n / 16 => DType::Q5_K,
            F::Q3_K_M => DType::Q4_K,
            F::IQ3_M if early || (self.shape.n_expert == 8 && more_bits(i, n)) => DType::Q4_K,
            F::Q3_K_L => DType::Q5_K,
            F::Q4_K_M | F::Q5_K_M if more_bits(i, n) => DType::Q6_K,
            F::IQ4_NL | F::IQ4_XS if early && !self.has_imatrix => DType::Q5_K,
            F::Q4_K_S if early => DType::Q5_K,
            // The first down projections can go astray even with an importance matrix.
            F::Q4_0 if early && self.has_imatrix => DType::Q4_1,
            F::Q5_0 if early && self.has_imatrix => DType::Q5_1,
            other => other.base(),
        })
    }

    /// Gate and up projections.
    fn inner_type(&self, i: usize) -> DType {
        let n = self.shape.n_layer;
        match self.file_type {
            F::IQ3_XS if (n / 8..7 * n / 8).contains(&i) => DType::IQ3_XXS,
            other => other.base(),
        }
    }

    fn key_type(&self, role: Role) -> DType {
        match self.file_type {
            _ if role == Role::Key && self.shape.n_expert == 8 => DType::Q8_0,
            F::IQ3_XS => DType::IQ3_XXS,
            F::IQ3_XXS => DType::IQ2_S,
            other => other.base(),
        }
    }

    fn attn_output_type(&self) -> DType {
        let base = self.file_type.base();
        if self.shape.n_expert == 8 {
            return match self.file_type {
                F::Q2_K
                | F::IQ3_XS
                | F::IQ3_XXS
                | F::IQ3_S
                | F::IQ3_M
                | F::Q3_K_S
                | F::Q3_K_M
                | F::IQ4_NL
                | F::IQ4_XS
                | F::Q4_K_S
                | F::Q4_K_M => DType::Q5_K,
                _ => base,
            };
        }
        match self.file_type {
            F::Q2_K => DType::Q3_K,
            F::IQ3_XXS => DType::IQ3_S,
            F::Q3_K_M | F::IQ3_M => DType::Q4_K,
            F::Q3_K_L => DType::Q5_K,
            _ => base,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        for file_type in FileType::ALL {
            assert_eq!(FileType::from_name(&file_type.name()), Some(file_type));
        }
        assert_eq!(FileType::from_name("q4_k"), Some(FileType::Q4_K_M));
        assert_eq!(FileType::from_name("iq4_xs"), Some(FileType::IQ4_XS));
        assert_eq!(FileType::from_name("q9_k"), None);
        assert_eq!(FileType::BF16.number(), 32);
    }

    #[test]
    fn rows_that_blocks_do_not_divide_get_smaller_blocks() {
        assert_eq!(fitting(DType::Q4_K, 512), DType::Q4_K);
        assert_eq!(fitting(DType::Q4_K, 96), DType::Q5_0);
        assert_eq!(fitting(DType::IQ3_XXS, 96), DType::IQ4_NL);
        assert_eq!(fitting(DType::Q6_K, 100), DType::F16);
        assert_eq!(fitting(DType::Q8_0, 100), DType::F16);
        assert_eq!(fitting(DType::BF16, 100), DType::BF16);
    }

    #[test]
    fn tensors_go_outside_layers_first_and_then_by_layer() {
        let mut names = [
            "blk.10.a",
            "token_embd.weight",
            "blk.2.b",
            "output.weight",
            "blk.2.a",
        ];
        names.sort_by(|a, b| order(a, b));
        assert_eq!(
            names,
            [
                "output.weight",
                "token_embd.weight",
                "blk.2.a",
                "blk.2.b",
                "blk.10.a"
            ]
        );
    }
}
