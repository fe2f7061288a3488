"""Types of the extension that native/bindings.cpp builds."""

from collections.abc import Sequence
from enum import Enum

DType = Enum("DType", "f32 bf16 f16")
Activation = Enum("Activation", "silu gelu_tanh")

class RmsNorm:
    def __init__(self, weight: int, eps: float, one_plus: bool) -> None: ...

class PackedWeight:
    def __init__(
        self, dtype: DType, packed: int, in_features: int, out_features: int, panels: int = 0
    ) -> None: ...

BlockKind = Enum("BlockKind", "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL MXFP4 F8_E4M3 IQ4_XS")

class RawBlocks:
    def __init__(self, kind: BlockKind, data: int, in_features: int, out_features: int) -> None: ...

class DecoderWorkspace:
    num_sub_batches: int

class DecoderLayer:
    def __init__(
        self, *, qkv: PackedWeight, qkv_bias: int, output: PackedWeight, output_bias: int,
        gate_up: PackedWeight, gate_up_bias: int, down: PackedWeight, down_bias: int, input_norm: RmsNorm,
        query_norm: RmsNorm, key_norm: RmsNorm, post_norm: RmsNorm, output_norm: RmsNorm, down_norm: RmsNorm,
        activation: Activation, num_query_heads: int, num_kv_heads: int, head_dim: int,
    ) -> None: ...  # fmt: skip
    @property
    def dtype(self) -> DType: ...

class Field:
    def __init__(self, data: int, slot_bytes: int, block_bytes: int) -> None: ...

Format = Enum("Format", "float32 bfloat16 float16 fp8_e4m3 int8 int4 int3 int2")

class CodedVectors:
    def __init__(
        self, *, format: Format, code: Field, group: int, scale: Field, min: Field, num_outliers: int,
        outlier: Field, channel: Field, rotation: int,
    ) -> None: ...  # fmt: skip

class Pool:
    def __init__(
        self, *, fields: list[Field], k: int, v: int, position: int, accumulators: int, num_slots: int,
        num_accumulators: int, block_size: int, block_stride: int, head_dim: int, dtype: DType,
        keys: CodedVectors | None = None, values: CodedVectors | None = None, bias: Field | None = None,
    ) -> None: ...  # fmt: skip

class WideWindow:
    def __init__(
        self, *, first_layer: int, num_layers: int, num_heads: int, head_dim: int, sinks: int, recent: int,
        dtype: DType, k: int, v: int, position: int,
    ) -> None: ...  # fmt: skip

class Cache(Pool):
    def __init__(
        self, pool: Pool, *, pages: int, page_table: int, lengths: int, num_layers: int, num_heads: int,
        table_heads: int, page_entries: int, pages_per_seq: int, windows: list[WideWindow],
    ) -> None: ...  # fmt: skip

Term = Enum("Term", "attention squared below_average")
Group = Enum("Group", "sum mean max")

class AttentionObserver:
    def __init__(
        self, *, terms: list[Term], group: Group, exclude_first: int, replace: bool, smoothing_size: int,
        smoothing_max: bool, smoothing_per_query_head: bool, smoothing_skip_window: bool,
    ) -> None: ...  # fmt: skip

class Batch:
    def __init__(
        self, *, slots: list[int], counts: list[int], starts: list[int], position: int, num_tokens: int,
        observer: list[int], observe_from: list[int], observers: list[AttentionObserver],
        temporary: list[bool],
    ) -> None: ...  # fmt: skip
    @property
    def end(self) -> int: ...

class AttentionSpec:
    def __init__(
        self, *, scale: float, window: int, softcap: float, sinks: int, slopes: int, chunked: bool
    ) -> None: ...

class Selection:
    def __init__(self, *, most: int, renormalize: bool, select_from: list[int]) -> None: ...

class StateSlots:
    def __init__(self, base: int, stride: int, slots: int, seqs: int) -> None: ...

class SeqRows:
    def __init__(self, base: int, stride: int) -> None: ...

class ValuesRead:
    head_queries: int
    selected: int
    rows: int
    in_full: int

class FarLayers:
    def __init__(self, *, cache: Cache, first: int) -> None: ...
    def take_counts(self) -> ValuesRead: ...

class StackedLayer:
    def __init__(self, layer: DecoderLayer, spec: AttentionSpec, index: int) -> None: ...

class Decoder:
    def __init__(
        self, *, embedding: int, embedding_rows: PackedWeight, num_tokens: int, layers: list[StackedLayer],
        selects: bool, norm: RmsNorm, head: PackedWeight, head_bias: int,
    ) -> None: ...  # fmt: skip
    @property
    def dtype(self) -> DType: ...

class KeyRows:
    def __init__(self, *, pool: Pool, slot: int, length: int, rows: int, stride: int) -> None: ...

class Workspace: ...

class Kernels:
    def __init__(self, instruction_set: str, block_instruction_set: str = "") -> None: ...
    def write(
        self, cache: Cache, batch: Batch, layer: int, dtype: DType, k: int, k_token_stride: int,
        k_head_stride: int, v: int, v_token_stride: int, v_head_stride: int, threads: int,
    ) -> None: ...  # fmt: skip
    def compact(self, pool: Pool, source: int, target: int, n: int, threads: int) -> None: ...
    def keep_best(
        self, pool: Pool, block: int, length: int, kept: int, score: int, must_stay: int, rows: int,
        stride: int, threads: int,
    ) -> None: ...  # fmt: skip
    def attend(
        self, work: Workspace, cache: Cache, batch: Batch, layer: int, dtype: DType, q: int,
        q_token_stride: int, q_head_stride: int, out: int, num_query_heads: int, spec: AttentionSpec,
        threads: int,
    ) -> None: ...  # fmt: skip
    def attend_selected(
        self, work: Workspace, cache: Cache, batch: Batch, *, layer: int, dtype: DType, q: int, q_token: int,
        q_head: int, out: int, num_query_heads: int, spec: AttentionSpec, selection: Selection, threads: int,
    ) -> ValuesRead: ...  # fmt: skip
    def replay(
        self, work: Workspace, cache: Cache, *, layer: int, slot: int, head: int, start: int, end: int,
        context_len: int, dtype: DType, q: int, q_token: int, q_head: int, count: int, first: int, every: int,
        num_query_heads: int, spec: AttentionSpec, threads: int,
    ) -> None: ...  # fmt: skip
    def leverage(self, rows: KeyRows, ridge: float, score: int, threads: int) -> None: ...
    def key_difference(
        self, rows: KeyRows, *, position: int, sum: int, counted: int, cos: int, sin: int, pairs: int,
        stride: int, first: int, interleaved: bool, score: int, threads: int,
    ) -> None: ...  # fmt: skip
    def smooth_rows(
        self, x: int, position: int, length: int, rows: int, stride: int, smoothing_size: int,
        smoothing_max: bool, out: int, threads: int,
    ) -> None: ...  # fmt: skip
    def rms_norm(
        self, dtype: DType, x: int, add: int, out: int, tokens: int, size: int, norm: RmsNorm, threads: int
    ) -> None: ...
    def add_normed(
        self, dtype: DType, x: int, sum: int, tokens: int, size: int, norm: RmsNorm, threads: int
    ) -> None: ...
    def rotate(
        self, dtype: DType, heads: int, token_stride: int, tokens: int, num_query_heads: int,
        num_kv_heads: int, head_dim: int, cos: int, sin: int, rotary_dim: int, query_norm: RmsNorm,
        key_norm: RmsNorm, threads: int,
    ) -> None: ...  # fmt: skip
    def gate(
        self, dtype: DType, gate_up: int, out: int, tokens: int, size: int, activation: Activation,
        threads: int,
    ) -> None: ...  # fmt: skip
    def packed_size(self, in_features: int, out_features: int) -> int: ...
    def block_bytes(self, kind: BlockKind, in_features: int, out_features: int) -> int: ...
    def pack_blocks(self, raw: RawBlocks, out: int, threads: int) -> None: ...
    def dequantize_blocks(self, raw: RawBlocks, dtype: DType, out: int, threads: int) -> None: ...
    def pack(self, weight: PackedWeight, dense: int, threads: int) -> None: ...
    def unpack_rows(
        self, weight: PackedWeight, features: int, count: int, out: int, threads: int
    ) -> None: ...
    def linear(
        self, weight: PackedWeight, x: int, x_stride: int, bias: int, out: int, rows: int, threads: int
    ) -> None: ...
    def grouped_linear(
        self, weights: Sequence[PackedWeight], biases: Sequence[int], x: int, out: int, counts: Sequence[int],
        threads: int,
    ) -> None: ...  # fmt: skip
    def pre_attention(
        self, work: DecoderWorkspace, layer: DecoderLayer, x: int, tokens: int, cos: int, sin: int,
        rotary_dim: int, qkv: int, threads: int,
    ) -> None: ...  # fmt: skip
    def post_attention(
        self, work: DecoderWorkspace, layer: DecoderLayer, x: int, attended: int, tokens: int, threads: int
    ) -> None: ...
    def decoder_layer(
        self, work: DecoderWorkspace, layer: DecoderLayer, index: int, x: int, cos: int, sin: int,
        rotary_dim: int, spec: AttentionSpec, cache: Cache, batch: Batch, attention_work: Workspace,
        far: FarLayers | None, selection: Selection | None, threads: int,
    ) -> None: ...  # fmt: skip
    def decode(
        self, work: DecoderWorkspace, decoder: Decoder, tokens: int, cos: int, sin: int, rotary_dim: int,
        cache: Cache, batch: Batch, attention_work: Workspace, far: FarLayers | None,
        selection: Selection | None, num_wanted: int, wanted: int, logits: int, threads: int,
    ) -> None: ...  # fmt: skip
    def conv_step(
        self, dtype: DType, state: StateSlots, x: SeqRows, weight: int, bias: int, out: int, channels: int,
        length: int, taps: int, silu: bool, threads: int,
    ) -> None: ...  # fmt: skip
    def delta_step(
        self, dtype: DType, state: StateSlots, query: SeqRows, key: SeqRows, value: SeqRows, log_decay: int,
        rate: int, out: int, key_heads: int, heads: int, key_size: int, value_size: int, decay_size: int,
        norm: bool, threads: int,
    ) -> None: ...  # fmt: skip
    def space_step(
        self, dtype: DType, state: StateSlots, x: SeqRows, b: SeqRows, c: SeqRows, dt: int, a: int, d: int,
        out: int, heads: int, head_size: int, state_size: int, groups: int, a_size: int, threads: int,
    ) -> None: ...  # fmt: skip
    def greedy(
        self, dtype: DType, logits: int, stride: int, count: int, size: int, tokens: int, threads: int
    ) -> None: ...

def instruction_sets() -> list[str]: ...
def block_instruction_sets() -> list[str]: ...

class TeamWait:
    is_short: bool
    def stop(self) -> None: ...

def release_team() -> None: ...
def run_queue_delay_ns() -> int: ...
