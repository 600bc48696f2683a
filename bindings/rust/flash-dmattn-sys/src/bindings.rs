// Written by scripts/rust_bindings.py from include/flash_dmattn.h, which is the manual.
use super::*;
pub type fdm_status = c_int;
pub type fdm_dtype = c_int;
pub type fdm_tune_wish = c_int;
pub type fdm_invariance = c_int;
pub type fdm_pass = c_int;
pub type fdm_memory_tier = c_int;
pub type fdm_tune_state = c_int;
pub type fdm_layout_kind = c_int;
pub type fdm_rank_algorithm = c_int;
pub const FDM_VERSION_MAJOR: i32 = 0;
pub const FDM_VERSION_MINOR: i32 = 1;
pub const FDM_VERSION_PATCH: i32 = 0;
pub const FDM_VERSION: &str = "0.1.0";
pub const FDM_OK: fdm_status = 0;
pub const FDM_ERROR_INVALID_ARGUMENT: fdm_status = 1;
pub const FDM_ERROR_UNSUPPORTED: fdm_status = 2;
pub const FDM_ERROR_OUT_OF_MEMORY: fdm_status = 3;
pub const FDM_ERROR_WORKSPACE: fdm_status = 4;
pub const FDM_ERROR_SYSTEM: fdm_status = 5;
pub const FDM_ERROR_INTERNAL: fdm_status = 6;
pub const FDM_ERROR_REMOTE: fdm_status = 7;
pub const FDM_CPU: i32 = 1;
pub const FDM_CUDA: i32 = 2;
pub const FDM_FLOAT32: fdm_dtype = 0;
pub const FDM_FLOAT16: fdm_dtype = 1;
pub const FDM_BFLOAT16: fdm_dtype = 2;
pub const FDM_FLOAT64: fdm_dtype = 3;
pub const FDM_BOOL: fdm_dtype = 4;
pub const FDM_INT32: fdm_dtype = 5;
pub const FDM_INT64: fdm_dtype = 6;
pub const FDM_UINT32: fdm_dtype = 7;
pub const FDM_NO_DTYPE: fdm_dtype = -1;
pub const FDM_TUNE_DEFAULT: fdm_tune_wish = 0;
pub const FDM_TUNE_MEASURE: fdm_tune_wish = 1;
pub const FDM_TUNE_RULES: fdm_tune_wish = 2;
pub const FDM_TUNE_PREDICT: fdm_tune_wish = 3;
pub const FDM_INVARIANCE_NONE: fdm_invariance = 0;
pub const FDM_INVARIANCE_BATCH: fdm_invariance = 1;
pub const FDM_INVARIANCE_SCHEDULE: fdm_invariance = 2;
pub const FDM_FORWARD: fdm_pass = 0;
pub const FDM_BACKWARD: fdm_pass = 1;
pub const FDM_MEMORY_LOW: fdm_memory_tier = 0;
pub const FDM_MEMORY_MEDIUM: fdm_memory_tier = 1;
pub const FDM_MEMORY_HIGH: fdm_memory_tier = 2;
pub const FDM_PLAN_PARAMETERS: usize = 16;
pub const FDM_PREDICTION_FEATURES: usize = 8;
pub const FDM_TUNE_SAMPLES: usize = 15;
pub const FDM_TUNE_TIMED: fdm_tune_state = 0;
pub const FDM_TUNE_NOT_TIMED: fdm_tune_state = 1;
pub const FDM_TUNE_WRONG: fdm_tune_state = 2;
pub const FDM_TUNE_FAILED: fdm_tune_state = 3;
pub const FDM_LAYOUT_CONTIGUOUS: fdm_layout_kind = 0;
pub const FDM_LAYOUT_ZIGZAG: fdm_layout_kind = 1;
pub const FDM_LAYOUT_DOCUMENTS: fdm_layout_kind = 2;
pub const FDM_LAYOUT_BALANCED: fdm_layout_kind = 3;
pub const FDM_LAYOUT_RANGES: fdm_layout_kind = 4;
pub const FDM_RANKS_AUTO: fdm_rank_algorithm = 0;
pub const FDM_RANKS_GATHER: fdm_rank_algorithm = 1;
pub const FDM_RANKS_ULYSSES: fdm_rank_algorithm = 2;
pub const FDM_RANKS_BOTH: fdm_rank_algorithm = 3;
pub const FDM_RANKS_RING: fdm_rank_algorithm = 4;
pub const FDM_NCCL_ID_BYTES: i32 = 128;
#[repr(C)]
pub struct fdm_timer {
    _private: [u8; 0],
}
#[repr(C)]
pub struct fdm_layout {
    _private: [u8; 0],
}
#[repr(C)]
pub struct fdm_ranks_plan {
    _private: [u8; 0],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_device_id {
    pub r#type: i32,
    pub index: i32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_data_type {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_tensor {
    pub data: *mut c_void,
    pub device: fdm_device_id,
    pub ndim: i32,
    pub dtype: fdm_data_type,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_cache {
    pub struct_bytes: u32,
    pub rotary_interleaved: i32,
    pub block_table: *const fdm_tensor,
    pub page_start: *const fdm_tensor,
    pub cache_row: *const fdm_tensor,
    pub lengths: *const fdm_tensor,
    pub first_key: *const fdm_tensor,
    pub k_new: *const fdm_tensor,
    pub v_new: *const fdm_tensor,
    pub cu_seqlens_new: *const fdm_tensor,
    pub rotary_cos: *const fdm_tensor,
    pub rotary_sin: *const fdm_tensor,
    pub rotary_start: *const fdm_tensor,
    pub fault: *mut fdm_tensor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_tensors {
    pub struct_bytes: u32,
    pub q: *const fdm_tensor,
    pub k: *const fdm_tensor,
    pub v: *const fdm_tensor,
    pub mask: *const fdm_tensor,
    pub bias: *const fdm_tensor,
    pub interval_start: *const fdm_tensor,
    pub interval_end: *const fdm_tensor,
    pub cu_seqlens_q: *const fdm_tensor,
    pub cu_seqlens_k: *const fdm_tensor,
    pub out: *mut fdm_tensor,
    pub lse: *mut fdm_tensor,
    pub dout: *const fdm_tensor,
    pub dlse: *const fdm_tensor,
    pub dq: *mut fdm_tensor,
    pub dk: *mut fdm_tensor,
    pub dv: *mut fdm_tensor,
    pub dbias: *mut fdm_tensor,
    pub lse_low: *mut fdm_tensor,
    pub sink: *const fdm_tensor,
    pub dsink: *mut fdm_tensor,
    pub seqused_q: *const fdm_tensor,
    pub seqused_k: *const fdm_tensor,
    pub cache: *const fdm_cache,
    pub row_start: *const fdm_tensor,
    pub row_end: *const fdm_tensor,
    pub block_mask: *const fdm_tensor,
    pub mask_plan: *const fdm_tile_plan,
    pub tree: *const fdm_tensor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_options {
    pub struct_bytes: u32,
    pub has_softmax_scale: i32,
    pub causal: i32,
    pub deterministic: i32,
    pub softmax_scale: f64,
    pub softcap: f64,
    pub window_left: i64,
    pub window_right: i64,
    pub max_seqlen_q: i64,
    pub max_seqlen_k: i64,
    pub num_threads: i32,
    pub kernel: *const c_char,
    pub family: *const c_char,
    pub executor: *const fdm_executor,
    pub stream: *mut c_void,
    pub lse_without_sink: i64,
    pub tune: i64,
    pub add_dkv: i64,
    pub sm_margin: i64,
    pub invariance: i64,
    pub num_splits: i64,
    pub split_keys: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_executor {
    pub context: *mut c_void,
    pub num_threads: i32,
    pub run: Option<unsafe extern "C" fn(context: *mut c_void, num_threads: i32, body: Option<unsafe extern "C" fn(argument: *mut c_void, index: i32)>, argument: *mut c_void)>,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_allocator {
    pub context: *mut c_void,
    pub allocate: Option<unsafe extern "C" fn(context: *mut c_void, bytes: usize) -> *mut c_void>,
    pub release: Option<unsafe extern "C" fn(context: *mut c_void, memory: *mut c_void)>,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_merge_tensors {
    pub struct_bytes: u32,
    pub out1: *const fdm_tensor,
    pub lse1: *const fdm_tensor,
    pub lse_low1: *const fdm_tensor,
    pub out2: *const fdm_tensor,
    pub lse2: *const fdm_tensor,
    pub lse_low2: *const fdm_tensor,
    pub out: *mut fdm_tensor,
    pub lse: *mut fdm_tensor,
    pub lse_low: *mut fdm_tensor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_problem {
    pub pass: fdm_pass,
    pub dtype: fdm_dtype,
    pub batch: i64,
    pub heads: i64,
    pub heads_kv: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub total_q: i64,
    pub total_k: i64,
    pub softmax_scale: f64,
    pub softcap: f64,
    pub window_left: i64,
    pub window_right: i64,
    pub causal: i32,
    pub varlen: i32,
    pub deterministic: i32,
    pub needs_lse: i32,
    pub needs_dq: i32,
    pub needs_dk: i32,
    pub needs_dv: i32,
    pub needs_dbias: i32,
    pub has_dlse: i32,
    pub has_lse_low: i32,
    pub has_intervals: i32,
    pub has_mask: i32,
    pub has_bias: i32,
    pub bias_dtype: fdm_dtype,
    pub interval_batch: i64,
    pub interval_heads: i64,
    pub mask_shape: [i64; 4],
    pub bias_shape: [i64; 4],
    pub aligned: i32,
    pub scores_aligned: i32,
    pub q_mappable: i32,
    pub keys_mappable: i32,
    pub scores_mappable: i32,
    pub has_sink: i32,
    pub needs_dsink: i32,
    pub sink_dtype: fdm_dtype,
    pub num_sinks: i32,
    pub lse_without_sink: i32,
    pub has_seqused_q: i32,
    pub has_seqused_k: i32,
    pub new_rows: i64,
    pub has_cache: i32,
    pub page_size: i32,
    pub num_pages: i32,
    pub max_pages: i32,
    pub ragged_pages: i32,
    pub has_first_key: i32,
    pub has_cache_row: i32,
    pub rotary_dim: i32,
    pub rotary_interleaved: i32,
    pub dkv_float32: i32,
    pub add_dkv: i32,
    pub has_row_intervals: i32,
    pub row_interval_batch: i64,
    pub row_interval_heads: i64,
    pub row_ranges: i32,
    pub invariance: i32,
    pub num_splits: i32,
    pub split_keys: i32,
    pub block_mask_size: i32,
    pub block_mask_batch: i32,
    pub block_mask_heads: i32,
    pub has_tree: i8,
    pub value_in_key: i8,
    pub reserved: [i8; 2],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_device {
    pub struct_bytes: u32,
    pub id: fdm_device_id,
    pub present: i32,
    pub name: [c_char; 64],
    pub isa: [c_char; 32],
    pub isa_by_name: [c_char; 32],
    pub num_threads: i32,
    pub compute_major: i32,
    pub compute_minor: i32,
    pub num_sms: i32,
    pub registers_per_sm: i32,
    pub threads_per_sm: i32,
    pub nvrtc_version: i32,
    pub l1_bytes: i64,
    pub l2_bytes: i64,
    pub l3_bytes: i64,
    pub shared_bytes: i64,
    pub bandwidth: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_arch_config {
    pub struct_bytes: u32,
    pub tier: fdm_memory_tier,
    pub async_copy: i32,
    pub float8: i32,
    pub bulk_copy: i32,
    pub warpgroup_mma: i32,
    pub tensor_memory: i32,
    pub shared_bytes: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_plan {
    pub struct_bytes: u32,
    pub problem: fdm_problem,
    pub device: fdm_device_id,
    pub family: [c_char; 16],
    pub kernel: [c_char; 48],
    pub choice: [c_char; 64],
    pub kernel_index: i32,
    pub block_m: i32,
    pub block_n: i32,
    pub stages: i32,
    pub v_in_registers: i32,
    pub num_threads: i32,
    pub shared_bytes: i64,
    pub workspace_bytes: i64,
    pub parameters: [i32; FDM_PLAN_PARAMETERS],
    pub reason: [c_char; 512],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_prediction {
    pub struct_bytes: u32,
    pub num_samples: i32,
    pub seconds: f64,
    pub residual: f64,
    pub features: [f64; FDM_PREDICTION_FEATURES],
    pub name: [c_char; 128],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_kernel_info {
    pub struct_bytes: u32,
    pub pass: fdm_pass,
    pub family: *const c_char,
    pub name: *const c_char,
    pub description: *const c_char,
    pub available: i32,
    pub device_type: i32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_launch {
    pub struct_bytes: u32,
    pub stream: *mut c_void,
    pub executor: *const fdm_executor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_kernel_resources {
    pub struct_bytes: u32,
    pub threads: i32,
    pub registers: i32,
    pub spill_bytes: i32,
    pub blocks_per_sm: i32,
    pub warps_per_sm: i32,
    pub max_warps: i32,
    pub entry: [c_char; 48],
    pub bound: [c_char; 32],
    pub shared_bytes: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_tune_options {
    pub struct_bytes: u32,
    pub exhaustive: i32,
    pub compile_only: i32,
    pub max_variants: i32,
    pub rounds: i32,
    pub keep: i32,
    pub seconds: f64,
    pub window: i64,
    pub progress: Option<unsafe extern "C" fn(context: *mut c_void, step: *const c_char, done: i32, count: i32)>,
    pub context: *mut c_void,
    pub stream: *mut c_void,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_tune_row {
    pub struct_bytes: u32,
    pub state: fdm_tune_state,
    pub kernel: [c_char; 48],
    pub choice: [c_char; 64],
    pub is_rule: i32,
    pub num_samples: i32,
    pub num_threads: i32,
    pub reserved: i32,
    pub seconds: f64,
    pub quartile_low: f64,
    pub quartile_high: f64,
    pub difference: f64,
    pub samples: [f64; FDM_TUNE_SAMPLES],
    pub why: [c_char; 160],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_tune_result {
    pub struct_bytes: u32,
    pub num_rows: i32,
    pub best: i32,
    pub num_places: i32,
    pub compile_seconds: f64,
    pub device_seconds: f64,
    pub kept: i32,
    pub reserved: i32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_kept_choice {
    pub struct_bytes: u32,
    pub num_samples: i32,
    pub num_threads: i32,
    pub reserved: i32,
    pub kernel: [c_char; 48],
    pub choice: [c_char; 64],
    pub rule_kernel: [c_char; 48],
    pub rule_choice: [c_char; 64],
    pub seconds: f64,
    pub rule_seconds: f64,
    pub date: i64,
    pub key: [c_char; 896],
    pub maker: [c_char; 128],
    pub file: [c_char; 128],
    pub ignored: [c_char; 128],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_key_rules {
    pub struct_bytes: u32,
    pub document_ids: *const fdm_tensor,
    pub prefix_lengths: *const fdm_tensor,
    pub window_sizes: *const fdm_tensor,
    pub interval_start: *const fdm_tensor,
    pub interval_end: *const fdm_tensor,
    pub cu_seqlens_q: *const fdm_tensor,
    pub cu_seqlens_k: *const fdm_tensor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_topk_slots {
    pub struct_bytes: u32,
    pub key: *mut fdm_tensor,
    pub bias: *mut fdm_tensor,
    pub length: *mut fdm_tensor,
    pub k: *mut fdm_tensor,
    pub v: *mut fdm_tensor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_tile_plan {
    pub struct_bytes: u32,
    pub reserved: i32,
    pub memory: *mut c_void,
    pub memory_bytes: u64,
    pub device: fdm_device_id,
    pub batches: i64,
    pub heads: i64,
    pub row_tiles: i64,
    pub key_words: i64,
    pub seen: *const u32,
    pub full: *const u32,
    pub problem: fdm_problem,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_append_tensors {
    pub struct_bytes: u32,
    pub k: *mut fdm_tensor,
    pub v: *mut fdm_tensor,
    pub cache: *const fdm_cache,
    pub slots: *const fdm_tensor,
    pub positions: *const fdm_tensor,
    pub q: *const fdm_tensor,
    pub cu_seqlens_q: *const fdm_tensor,
    pub q_out: *mut fdm_tensor,
    pub stream: *mut c_void,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_setting_info {
    pub struct_bytes: u32,
    pub valid: i32,
    pub name: [c_char; 64],
    pub description: *const c_char,
    pub allowed: *const c_char,
    pub value: *const c_char,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_cache_info {
    pub struct_bytes: u32,
    pub num_ignored: i32,
    pub folder: [c_char; 512],
    pub num_entries: i64,
    pub bytes: i64,
    pub limit_bytes: i64,
    pub ignored: [c_char; 256],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_companion_choice {
    pub device: fdm_device_id,
    pub kernel: [c_char; 48],
    pub choice: [c_char; 64],
    pub kernel_index: i32,
    pub parameters: [i32; 8],
    pub shared_bytes: i64,
    pub workspace_bytes: i64,
    pub reason: [c_char; 512],
    pub reserved: [i64; 8],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_softmax_tensors {
    pub struct_bytes: u32,
    pub x: *const fdm_tensor,
    pub mask: *const fdm_tensor,
    pub out: *mut fdm_tensor,
    pub dout: *const fdm_tensor,
    pub dx: *mut fdm_tensor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_softmax_options {
    pub struct_bytes: u32,
    pub log: i32,
    pub scale: f64,
    pub kernel: *const c_char,
    pub stream: *mut c_void,
    pub tune: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_softmax_problem {
    pub pass: fdm_pass,
    pub dtype: fdm_dtype,
    pub rows: i64,
    pub columns: i64,
    pub log: i32,
    pub has_mask: i32,
    pub negative_scale: i32,
    pub aligned: i32,
    pub reserved: [i64; 8],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_softmax_plan {
    pub struct_bytes: u32,
    pub problem: fdm_softmax_problem,
    pub choice: fdm_companion_choice,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_gemm_tensors {
    pub struct_bytes: u32,
    pub a: *const fdm_tensor,
    pub b: *const fdm_tensor,
    pub c: *const fdm_tensor,
    pub out: *mut fdm_tensor,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_gemm_options {
    pub struct_bytes: u32,
    pub accumulate_float16: i32,
    pub alpha: f64,
    pub beta: f64,
    pub kernel: *const c_char,
    pub stream: *mut c_void,
    pub tune: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_gemm_problem {
    pub dtype: fdm_dtype,
    pub batch: i64,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub a_rows_contiguous: i32,
    pub b_rows_contiguous: i32,
    pub has_c: i32,
    pub accumulate_float16: i32,
    pub mappable: i32,
    pub reserved: [i64; 8],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_gemm_plan {
    pub struct_bytes: u32,
    pub problem: fdm_gemm_problem,
    pub choice: fdm_companion_choice,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_range {
    pub first: i64,
    pub end: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_rank_mask {
    pub struct_bytes: u32,
    pub causal: i32,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub window_left: i64,
    pub window_right: i64,
    pub num_lists: i64,
    pub interval_start: *const i32,
    pub interval_end: *const i32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_layout_wish {
    pub struct_bytes: u32,
    pub kind: fdm_layout_kind,
    pub ranks: i32,
    pub num_masks: i32,
    pub total: i64,
    pub block: i64,
    pub cu_seqlens: *const i64,
    pub num_documents: i64,
    pub masks: *const fdm_rank_mask,
    pub weights: *const f64,
    pub tolerance: f64,
    pub ranges: *const fdm_range,
    pub range_counts: *const i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_links {
    pub struct_bytes: u32,
    pub ranks_per_node: i32,
    pub node_bandwidth: f64,
    pub node_latency: f64,
    pub net_bandwidth: f64,
    pub net_latency: f64,
    pub copy_sms: i32,
    pub reserved: i32,
    pub flops: f64,
    pub memory_bytes: i64,
    pub host_start: f64,
    pub host_exchange: f64,
    pub sums_bandwidth: f64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_rank_forecast {
    pub struct_bytes: u32,
    pub rank: i32,
    pub rows: i64,
    pub pairs: i64,
    pub keys_fetched: i64,
    pub node_bytes: i64,
    pub net_bytes: i64,
    pub bytes_sent: i64,
    pub memory_bytes: i64,
    pub work_seconds: f64,
    pub exchange_seconds: f64,
    pub exposed_seconds: f64,
    pub seconds: f64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_ranks_forecast {
    pub struct_bytes: u32,
    pub algorithm: fdm_rank_algorithm,
    pub ranks: i32,
    pub head_ranks: i32,
    pub num_sets: i32,
    pub from_model: i32,
    pub seconds: f64,
    pub one_rank_seconds: f64,
    pub imbalance: f64,
    pub reason: [c_char; 400],
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_message {
    pub peer: i32,
    pub reserved: i32,
    pub memory: *mut c_void,
    pub bytes: usize,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_communicator {
    pub struct_bytes: u32,
    pub ranks: i32,
    pub rank: i32,
    pub device_type: i32,
    pub context: *mut c_void,
    pub exchange: Option<unsafe extern "C" fn(context: *mut c_void, sends: *const fdm_message, num_sends: i32, receives: *const fdm_message, num_receives: i32, stream: *mut c_void) -> fdm_status>,
    pub share: Option<unsafe extern "C" fn(context: *mut c_void, mine: *const c_void, bytes: usize, all: *mut c_void) -> fdm_status>,
    pub poll: Option<unsafe extern "C" fn(context: *mut c_void) -> fdm_status>,
    pub abort: Option<unsafe extern "C" fn(context: *mut c_void)>,
    pub broken: i32,
    pub reserved: i32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_ranks_options {
    pub struct_bytes: u32,
    pub rank: i32,
    pub algorithm: fdm_rank_algorithm,
    pub all_keys: i32,
    pub num_threads: i32,
    pub other_kernel: i32,
    pub head_ranks: i32,
    pub sm_margin: i32,
    pub memory_bytes: i64,
}
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fdm_ranks_plan_info {
    pub struct_bytes: u32,
    pub ranks: i32,
    pub rank: i32,
    pub algorithm: fdm_rank_algorithm,
    pub num_sets: i32,
    pub num_calls: i32,
    pub rows: i64,
    pub keys: i64,
    pub keys_fetched: i64,
    pub bytes_received: i64,
    pub bytes_sent: i64,
    pub workspace_bytes: i64,
    pub choice: [c_char; 64],
    pub reason: [c_char; 200],
}
grows! {
    fdm_cache {}
    fdm_tensors {}
    fdm_options {window_left: -1_i64, window_right: -1_i64}
    fdm_merge_tensors {}
    fdm_device {}
    fdm_arch_config {}
    fdm_plan {}
    fdm_prediction {}
    fdm_kernel_info {}
    fdm_launch {}
    fdm_kernel_resources {}
    fdm_tune_options {}
    fdm_tune_row {}
    fdm_tune_result {}
    fdm_kept_choice {}
    fdm_key_rules {}
    fdm_topk_slots {}
    fdm_tile_plan {}
    fdm_append_tensors {}
    fdm_setting_info {}
    fdm_cache_info {}
    fdm_softmax_tensors {}
    fdm_softmax_options {scale: 1_f64}
    fdm_softmax_plan {}
    fdm_gemm_tensors {}
    fdm_gemm_options {alpha: 1_f64}
    fdm_gemm_plan {}
    fdm_rank_mask {window_left: -1_i64, window_right: -1_i64}
    fdm_layout_wish {}
    fdm_links {}
    fdm_rank_forecast {}
    fdm_ranks_forecast {}
    fdm_communicator {}
    fdm_ranks_options {}
    fdm_ranks_plan_info {}
}
extern "C" {
    pub fn fdm_last_error() -> *const c_char;
    pub fn fdm_status_name(status: fdm_status) -> *const c_char;
    pub fn fdm_version() -> *const c_char;
    pub fn fdm_dtype_name(dtype: fdm_dtype) -> *const c_char;
    pub fn fdm_dtype_from_name(name: *const c_char) -> fdm_dtype;
    pub fn fdm_dtype_of(tensor: *const fdm_tensor) -> fdm_dtype;
    pub fn fdm_dtype_bytes(dtype: fdm_dtype) -> i64;
    pub fn fdm_data_type_of(dtype: fdm_dtype) -> fdm_data_type;
    pub fn fdm_attention_forward(tensors: *const fdm_tensors, options: *const fdm_options, allocator: *const fdm_allocator) -> fdm_status;
    pub fn fdm_attention_backward(tensors: *const fdm_tensors, options: *const fdm_options, allocator: *const fdm_allocator) -> fdm_status;
    pub fn fdm_merge(tensors: *const fdm_merge_tensors, stream: *mut c_void) -> fdm_status;
    pub fn fdm_problem_default() -> fdm_problem;
    pub fn fdm_problem_validate(problem: *const fdm_problem) -> fdm_status;
    pub fn fdm_describe(pass: fdm_pass, tensors: *const fdm_tensors, options: *const fdm_options, problem: *mut fdm_problem) -> fdm_status;
    pub fn fdm_device_query(r#type: i32, index: i32, device: *mut fdm_device) -> fdm_status;
    pub fn fdm_device_from_name(name: *const c_char, device: *mut fdm_device) -> fdm_status;
    pub fn fdm_supports_sm89_features(device: *const fdm_device) -> i32;
    pub fn fdm_supports_sm90_features(device: *const fdm_device) -> i32;
    pub fn fdm_arch_optimization_config(device: *const fdm_device, config: *mut fdm_arch_config) -> fdm_status;
    pub fn fdm_plan_attention(device: *const fdm_device, problem: *const fdm_problem, options: *const fdm_options, plan: *mut fdm_plan) -> fdm_status;
    pub fn fdm_plan_variant(device: *const fdm_device, problem: *const fdm_problem, kernel: *const c_char, variant: i32, plan: *mut fdm_plan) -> fdm_status;
    pub fn fdm_plan_predict(device: *const fdm_device, plan: *const fdm_plan, window: i64, prediction: *mut fdm_prediction) -> fdm_status;
    pub fn fdm_plan_to_json(plan: *const fdm_plan, buffer: *mut c_char, size: usize, needed: *mut usize) -> fdm_status;
    pub fn fdm_plan_from_json(json: *const c_char, length: usize, plan: *mut fdm_plan) -> fdm_status;
    pub fn fdm_kernel_list(index: i32, info: *mut fdm_kernel_info) -> fdm_status;
    pub fn fdm_execute(plan: *const fdm_plan, tensors: *const fdm_tensors, workspace: *mut c_void, workspace_bytes: usize, launch: *const fdm_launch) -> fdm_status;
    pub fn fdm_prepare(plan: *const fdm_plan) -> fdm_status;
    pub fn fdm_plan_resources(plan: *const fdm_plan, device: *const fdm_device, kernels: *mut fdm_kernel_resources, size: i32, count: *mut i32) -> fdm_status;
    pub fn fdm_memory_allocate(device: fdm_device_id, bytes: usize, memory: *mut *mut c_void) -> fdm_status;
    pub fn fdm_memory_release(device: fdm_device_id, memory: *mut c_void) -> fdm_status;
    pub fn fdm_memory_copy(to: *mut c_void, to_device: fdm_device_id, from: *const c_void, from_device: fdm_device_id, bytes: usize) -> fdm_status;
    pub fn fdm_memory_fill(device: fdm_device_id, memory: *mut c_void, value: u8, bytes: usize) -> fdm_status;
    pub fn fdm_synchronize(device: fdm_device_id) -> fdm_status;
    pub fn fdm_timer_create(device: fdm_device_id, timer: *mut *mut fdm_timer) -> fdm_status;
    pub fn fdm_timer_start(timer: *mut fdm_timer, stream: *mut c_void) -> fdm_status;
    pub fn fdm_timer_stop(timer: *mut fdm_timer, stream: *mut c_void, seconds: *mut f64) -> fdm_status;
    pub fn fdm_timer_release(timer: *mut fdm_timer);
    pub fn fdm_tune(device: *const fdm_device, problem: *const fdm_problem, options: *const fdm_tune_options, rows: *mut fdm_tune_row, size: i32, result: *mut fdm_tune_result) -> fdm_status;
    pub fn fdm_tune_kept(index: i32, choice: *mut fdm_kept_choice) -> fdm_status;
    pub fn fdm_tune_export(path: *const c_char, count: *mut i64) -> fdm_status;
    pub fn fdm_tune_import(path: *const c_char, count: *mut i64) -> fdm_status;
    pub fn fdm_tune_forget(count: *mut i64) -> fdm_status;
    pub fn fdm_key_bias(dt: *const fdm_tensor, a: *const fdm_tensor, padding: *const fdm_tensor, exponential: i32, bias: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_key_bias_backward(dt: *const fdm_tensor, a: *const fdm_tensor, padding: *const fdm_tensor, exponential: i32, dbias: *const fdm_tensor, ddt: *mut fdm_tensor, da: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_topk_intervals(bias: *const fdm_tensor, padding: *const fdm_tensor, window: i64, seqlen_q: i64, start: *mut fdm_tensor, end: *mut fdm_tensor, workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void) -> fdm_status;
    pub fn fdm_topk_intervals_workspace(bias: *const fdm_tensor, padding: *const fdm_tensor) -> usize;
    pub fn fdm_document_intervals(cu_seqlens: *const fdm_tensor, causal: i32, start: *mut fdm_tensor, end: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_window_intervals(seqlen_q: i64, causal: i32, window_left: i64, window_right: i64, start: *mut fdm_tensor, end: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_prefix_intervals(seqlen_q: i64, prefix: i64, start: *mut fdm_tensor, end: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_rule_intervals(rules: *const fdm_key_rules, seqlen_q: i64, start: *mut fdm_tensor, end: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_intervals_from_mask(mask: *const fdm_tensor, start: *mut fdm_tensor, end: *mut fdm_tensor, exact: *mut i32, stream: *mut c_void) -> fdm_status;
    pub fn fdm_intervals_to_mask(start: *const fdm_tensor, end: *const fdm_tensor, mask: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_mask_blocks(mask: *const fdm_tensor, block_q: i64, block_k: i64, blocks: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_blocks_from_lists(counts: *const fdm_tensor, indices: *const fdm_tensor, blocks: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_create_mask(bias: *const fdm_tensor, attention_mask: *const fdm_tensor, window: i64, min_value: f64, block_size: i64, mask: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_topk_fill(bias: *const fdm_tensor, end: *const fdm_tensor, k: *const fdm_tensor, v: *const fdm_tensor, block_table: *const fdm_tensor, slots: *const fdm_topk_slots, stream: *mut c_void) -> fdm_status;
    pub fn fdm_topk_append(bias: *const fdm_tensor, real: *const fdm_tensor, k: *const fdm_tensor, v: *const fdm_tensor, slots: *const fdm_topk_slots, slot: *mut fdm_tensor, stream: *mut c_void) -> fdm_status;
    pub fn fdm_count_visible(problem: *const fdm_problem, tensors: *const fdm_tensors, pairs: *mut i64) -> fdm_status;
    pub fn fdm_mask_plan_bytes(problem: *const fdm_problem) -> usize;
    pub fn fdm_mask_plan(tensors: *const fdm_tensors, options: *const fdm_options, plan: *mut fdm_tile_plan, stream: *mut c_void) -> fdm_status;
    pub fn fdm_cache_append(tensors: *const fdm_append_tensors) -> fdm_status;
    pub fn fdm_setting_list(index: i32, info: *mut fdm_setting_info) -> fdm_status;
    pub fn fdm_cache_folder(path: *mut c_char, size: usize) -> fdm_status;
    pub fn fdm_compiler_path(path: *mut c_char, size: usize) -> fdm_status;
    pub fn fdm_cache_query(info: *mut fdm_cache_info) -> fdm_status;
    pub fn fdm_cache_pack(path: *const c_char, num_entries: *mut i64, bytes: *mut i64) -> fdm_status;
    pub fn fdm_shutdown();
    pub fn fdm_describe_softmax(pass: fdm_pass, tensors: *const fdm_softmax_tensors, options: *const fdm_softmax_options, problem: *mut fdm_softmax_problem) -> fdm_status;
    pub fn fdm_plan_softmax(device: *const fdm_device, problem: *const fdm_softmax_problem, kernel: *const c_char, plan: *mut fdm_softmax_plan) -> fdm_status;
    pub fn fdm_execute_softmax(plan: *const fdm_softmax_plan, tensors: *const fdm_softmax_tensors, options: *const fdm_softmax_options, workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void) -> fdm_status;
    pub fn fdm_softmax(pass: fdm_pass, tensors: *const fdm_softmax_tensors, options: *const fdm_softmax_options, allocator: *const fdm_allocator) -> fdm_status;
    pub fn fdm_plan_softmax_variant(device: *const fdm_device, problem: *const fdm_softmax_problem, kernel: *const c_char, variant: i32, plan: *mut fdm_softmax_plan) -> fdm_status;
    pub fn fdm_tune_softmax(device: *const fdm_device, problem: *const fdm_softmax_problem, options: *const fdm_tune_options, rows: *mut fdm_tune_row, size: i32, result: *mut fdm_tune_result) -> fdm_status;
    pub fn fdm_prepare_softmax(plan: *const fdm_softmax_plan) -> fdm_status;
    pub fn fdm_softmax_kernel(index: i32, name: *mut *const c_char, description: *mut *const c_char) -> fdm_status;
    pub fn fdm_describe_gemm(tensors: *const fdm_gemm_tensors, options: *const fdm_gemm_options, problem: *mut fdm_gemm_problem) -> fdm_status;
    pub fn fdm_plan_gemm(device: *const fdm_device, problem: *const fdm_gemm_problem, kernel: *const c_char, plan: *mut fdm_gemm_plan) -> fdm_status;
    pub fn fdm_execute_gemm(plan: *const fdm_gemm_plan, tensors: *const fdm_gemm_tensors, options: *const fdm_gemm_options, workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void) -> fdm_status;
    pub fn fdm_gemm(tensors: *const fdm_gemm_tensors, options: *const fdm_gemm_options, allocator: *const fdm_allocator) -> fdm_status;
    pub fn fdm_plan_gemm_variant(device: *const fdm_device, problem: *const fdm_gemm_problem, kernel: *const c_char, variant: i32, plan: *mut fdm_gemm_plan) -> fdm_status;
    pub fn fdm_tune_gemm(device: *const fdm_device, problem: *const fdm_gemm_problem, options: *const fdm_tune_options, rows: *mut fdm_tune_row, size: i32, result: *mut fdm_tune_result) -> fdm_status;
    pub fn fdm_prepare_gemm(plan: *const fdm_gemm_plan) -> fdm_status;
    pub fn fdm_gemm_kernel(index: i32, name: *mut *const c_char, description: *mut *const c_char) -> fdm_status;
    pub fn fdm_layout_create(wish: *const fdm_layout_wish, layout: *mut *mut fdm_layout) -> fdm_status;
    pub fn fdm_layout_release(layout: *mut fdm_layout);
    pub fn fdm_layout_ranges(layout: *const fdm_layout, rank: i32, ranges: *mut *const fdm_range, count: *mut i64) -> fdm_status;
    pub fn fdm_layout_work(layout: *const fdm_layout, layout_keys: *const fdm_layout, mask: *const fdm_rank_mask, pairs: *mut i64, fetched: *mut i64) -> fdm_status;
    pub fn fdm_rank_algorithm_name(algorithm: fdm_rank_algorithm) -> *const c_char;
    pub fn fdm_forecast_ranks(device: *const fdm_device, problem: *const fdm_problem, layout: *const fdm_layout, layout_keys: *const fdm_layout, mask: *const fdm_rank_mask, links: *const fdm_links, algorithm: fdm_rank_algorithm, forecast: *mut fdm_ranks_forecast, ranks: *mut fdm_rank_forecast) -> fdm_status;
    pub fn fdm_plan_ranks(device: *const fdm_device, problem: *const fdm_problem, layout: *const fdm_layout, layout_keys: *const fdm_layout, mask: *const fdm_rank_mask, options: *const fdm_ranks_options, plan: *mut *mut fdm_ranks_plan) -> fdm_status;
    pub fn fdm_ranks_plan_release(plan: *mut fdm_ranks_plan);
    pub fn fdm_ranks_plan_query(plan: *const fdm_ranks_plan, info: *mut fdm_ranks_plan_info) -> fdm_status;
    pub fn fdm_agree(plan: *const fdm_ranks_plan, communicator: *mut fdm_communicator) -> fdm_status;
    pub fn fdm_execute_ranks(plan: *const fdm_ranks_plan, tensors: *const fdm_tensors, workspace: *mut c_void, workspace_bytes: usize, communicator: *mut fdm_communicator, launch: *const fdm_launch) -> fdm_status;
    pub fn fdm_wait(communicator: *mut fdm_communicator, device: fdm_device_id, stream: *mut c_void, milliseconds: i64) -> fdm_status;
    pub fn fdm_nccl_communicator(nccl: *mut c_void, milliseconds: i64, communicator: *mut fdm_communicator) -> fdm_status;
    pub fn fdm_nccl_id(id: *mut u8) -> fdm_status;
    pub fn fdm_nccl_communicator_of_id(id: *const u8, ranks: i32, rank: i32, device: i32, milliseconds: i64, communicator: *mut fdm_communicator) -> fdm_status;
    pub fn fdm_nccl_release(communicator: *mut fdm_communicator);
}
