"""CPU kernels of Winnow. All tensors are given by address; see src/winnow/native.py for the checked face."""

import enum
from collections.abc import Sequence

class DType(enum.Enum):
    f32 = 0

    bf16 = 1

    f16 = 2

class Activation(enum.Enum):
    silu = 0

    gelu_tanh = 1

class RmsNorm:
    def __init__(self, weight: int, eps: float, one_plus: bool) -> None: ...

class PackedWeight:
    def __init__(
        self, dtype: DType, packed: int, in_features: int, out_features: int, panels: int = 0
    ) -> None: ...

class BlockKind(enum.Enum):
    Q4_0 = 0

    Q4_1 = 1

    Q5_0 = 2

    Q5_1 = 3

    Q8_0 = 4

    Q2_K = 5

    Q3_K = 6

    Q4_K = 7

    Q5_K = 8

    Q6_K = 9

    IQ4_NL = 10

    MXFP4 = 11

class RawBlocks:
    def __init__(self, kind: BlockKind, data: int, in_features: int, out_features: int) -> None: ...

class DecoderWorkspace:
    def __init__(self) -> None: ...
    @property
    def num_sub_batches(self) -> int: ...

class DecoderLayer:
    def __init__(
        self,
        *,
        qkv: PackedWeight,
        qkv_bias: int,
        output: PackedWeight,
        output_bias: int,
        gate_up: PackedWeight,
        gate_up_bias: int,
        down: PackedWeight,
        down_bias: int,
        input_norm: RmsNorm,
        query_norm: RmsNorm,
        key_norm: RmsNorm,
        post_norm: RmsNorm,
        output_norm: RmsNorm,
        down_norm: RmsNorm,
        activation: Activation,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None: ...
    @property
    def dtype(self) -> DType: ...

class Field:
    def __init__(self, data: int, slot_bytes: int, block_bytes: int) -> None: ...

class Format(enum.Enum):
    float32 = 0

    bfloat16 = 1

    float16 = 2

    fp8_e4m3 = 3

    int8 = 4

    int4 = 5

    int3 = 6

    int2 = 7

class CodedVectors:
    def __init__(
        self,
        *,
        format: Format,
        code: Field,
        group: int,
        scale: Field,
        min: Field,
        num_outliers: int,
        outlier: Field,
        channel: Field,
        rotation: int,
    ) -> None: ...

class Pool:
    def __init__(
        self,
        *,
        fields: Sequence[Field],
        k: int,
        v: int,
        position: int,
        accumulators: int,
        num_slots: int,
        num_accumulators: int,
        block_size: int,
        block_stride: int,
        head_dim: int,
        dtype: DType,
        keys: CodedVectors | None = None,
        values: CodedVectors | None = None,
        bias: Field | None = None,
    ) -> None: ...

class WideWindow:
    def __init__(
        self,
        *,
        first_layer: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        sinks: int,
        recent: int,
        dtype: DType,
        k: int,
        v: int,
        position: int,
    ) -> None: ...

class Cache(Pool):
    def __init__(
        self,
        pool: Pool,
        *,
        pages: int,
        page_table: int,
        lengths: int,
        num_layers: int,
        num_heads: int,
        table_heads: int,
        page_entries: int,
        pages_per_seq: int,
        windows: Sequence[WideWindow],
    ) -> None: ...

class Term(enum.Enum):
    attention = 0

    squared = 1

    group_squared = 2

    below_average = 3

    value_aware = 4

class Group(enum.Enum):
    sum = 0

    mean = 1

    max = 2

class AttentionObserver:
    def __init__(
        self,
        *,
        terms: Sequence[Term],
        group: Group,
        exclude_first: int,
        replace: bool,
        smoothing_size: int,
        smoothing_max: bool,
        smoothing_per_query_head: bool,
        smoothing_skip_window: bool,
    ) -> None: ...

class Batch:
    def __init__(
        self,
        *,
        slots: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        position: int,
        num_tokens: int,
        observer: Sequence[int],
        observe_from: Sequence[int],
        observers: Sequence[AttentionObserver],
        temporary: Sequence[bool],
    ) -> None: ...
    @property
    def end(self) -> int: ...

class AttentionSpec:
    def __init__(
        self, *, scale: float, window: int, softcap: float, sinks: int, slopes: int, chunked: bool
    ) -> None: ...

class Selection:
    def __init__(self, *, most: int, renormalize: bool, select_from: Sequence[int]) -> None: ...

class ValuesRead:
    @property
    def head_queries(self) -> int: ...
    @property
    def selected(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def in_full(self) -> int: ...

class FarLayers:
    def __init__(self, *, cache: Cache, first: int) -> None: ...
    def take_counts(self) -> ValuesRead: ...

class StackedLayer:
    def __init__(self, layer: DecoderLayer, spec: AttentionSpec, index: int) -> None: ...

class Decoder:
    def __init__(
        self,
        *,
        embedding: int,
        embedding_rows: PackedWeight,
        num_tokens: int,
        layers: Sequence[StackedLayer],
        selects: bool,
        norm: RmsNorm,
        head: PackedWeight,
        head_bias: int,
    ) -> None: ...
    @property
    def dtype(self) -> DType: ...

class KeyRows:
    def __init__(self, *, pool: Pool, slot: int, length: int, rows: int, stride: int) -> None: ...

class StateSlots:
    def __init__(self, base: int, stride: int, slots: int, seqs: int) -> None: ...

class SeqRows:
    def __init__(self, base: int, stride: int) -> None: ...

class Workspace:
    def __init__(self) -> None: ...

class Kernels:
    def __init__(self, instruction_set: str, block_instruction_set: str = "") -> None: ...
    @property
    def matrix_units(self) -> bool: ...
    def write(
        self,
        arg0: Cache,
        arg1: Batch,
        arg2: int,
        arg3: DType,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: int,
        arg10: int,
        /,
    ) -> None: ...
    def compact(self, arg0: Pool, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...
    def keep_best(
        self,
        arg0: Pool,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        /,
    ) -> None: ...
    def attend(
        self,
        arg0: Workspace,
        arg1: Cache,
        arg2: Batch,
        arg3: int,
        arg4: DType,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: int,
        arg10: AttentionSpec,
        arg11: int,
        /,
    ) -> None: ...
    def attend_selected(
        self,
        work: Workspace,
        cache: Cache,
        batch: Batch,
        *,
        layer: int,
        dtype: DType,
        q: int,
        q_token: int,
        q_head: int,
        out: int,
        num_query_heads: int,
        spec: AttentionSpec,
        selection: Selection,
        threads: int,
    ) -> ValuesRead: ...
    def replay(
        self,
        work: Workspace,
        cache: Cache,
        *,
        layer: int,
        slot: int,
        head: int,
        start: int,
        end: int,
        context_len: int,
        dtype: DType,
        q: int,
        q_token: int,
        q_head: int,
        count: int,
        first: int,
        every: int,
        num_query_heads: int,
        query_logs: int,
        key_logs: int,
        spec: AttentionSpec,
        threads: int,
    ) -> None: ...
    def leverage(self, arg0: KeyRows, arg1: float, arg2: int, arg3: int, /) -> None: ...
    def key_difference(
        self,
        rows: KeyRows,
        *,
        position: int,
        sum: int,
        counted: int,
        cos: int,
        sin: int,
        pairs: int,
        stride: int,
        first: int,
        interleaved: bool,
        score: int,
        threads: int,
    ) -> None: ...
    def smooth_rows(
        self,
        arg0: int,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: bool,
        arg7: int,
        arg8: int,
        /,
    ) -> None: ...
    def rms_norm(
        self, arg0: DType, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: RmsNorm, arg7: int, /
    ) -> None: ...
    def add_normed(
        self, arg0: DType, arg1: int, arg2: int, arg3: int, arg4: int, arg5: RmsNorm, arg6: int, /
    ) -> None: ...
    def rotate(
        self,
        arg0: DType,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: int,
        arg10: RmsNorm,
        arg11: RmsNorm,
        arg12: int,
        /,
    ) -> None: ...
    def gate(
        self, arg0: DType, arg1: int, arg2: int, arg3: int, arg4: int, arg5: Activation, arg6: int, /
    ) -> None: ...
    def packed_size(self, arg0: int, arg1: int, /) -> int: ...
    def block_bytes(self, arg0: BlockKind, arg1: int, arg2: int, /) -> int: ...
    def pack_blocks(self, arg0: RawBlocks, arg1: int, arg2: int, /) -> None: ...
    def dequantize_blocks(self, arg0: RawBlocks, arg1: DType, arg2: int, arg3: int, /) -> None: ...
    def pack(self, arg0: PackedWeight, arg1: int, arg2: int, /) -> None: ...
    def unpack_rows(self, arg0: PackedWeight, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...
    def linear(
        self, arg0: PackedWeight, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, /
    ) -> None: ...
    def grouped_linear(
        self,
        arg0: Sequence[PackedWeight],
        arg1: Sequence[int],
        arg2: int,
        arg3: int,
        arg4: Sequence[int],
        arg5: int,
        /,
    ) -> None: ...
    def pre_attention(
        self,
        arg0: DecoderWorkspace,
        arg1: DecoderLayer,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        /,
    ) -> None: ...
    def post_attention(
        self, arg0: DecoderWorkspace, arg1: DecoderLayer, arg2: int, arg3: int, arg4: int, arg5: int, /
    ) -> None: ...
    def decoder_layer(
        self,
        work: DecoderWorkspace,
        layer: DecoderLayer,
        index: int,
        x: int,
        cos: int,
        sin: int,
        rotary_dim: int,
        spec: AttentionSpec,
        cache: Cache,
        batch: Batch,
        attention_work: Workspace,
        far: FarLayers | None,
        selection: Selection | None,
        threads: int,
    ) -> None: ...
    def decode(
        self,
        work: DecoderWorkspace,
        decoder: Decoder,
        tokens: int,
        cos: int,
        sin: int,
        rotary_dim: int,
        cache: Cache,
        batch: Batch,
        attention_work: Workspace,
        far: FarLayers | None,
        selection: Selection | None,
        num_wanted: int,
        wanted: int,
        logits: int,
        threads: int,
    ) -> None: ...
    def conv_step(
        self,
        arg0: DType,
        arg1: StateSlots,
        arg2: SeqRows,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: bool,
        arg10: int,
        /,
    ) -> None: ...
    def delta_step(
        self,
        arg0: DType,
        arg1: StateSlots,
        arg2: SeqRows,
        arg3: SeqRows,
        arg4: SeqRows,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: int,
        arg10: int,
        arg11: int,
        arg12: int,
        arg13: bool,
        arg14: int,
        /,
    ) -> None: ...
    def space_step(
        self,
        arg0: DType,
        arg1: StateSlots,
        arg2: SeqRows,
        arg3: SeqRows,
        arg4: SeqRows,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: int,
        arg10: int,
        arg11: int,
        arg12: int,
        arg13: int,
        arg14: int,
        /,
    ) -> None: ...
    def greedy(
        self, arg0: DType, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, /
    ) -> None: ...

class TeamWait:
    def __init__(self) -> None: ...
    def stop(self) -> None: ...
    @property
    def is_short(self) -> bool: ...

def release_team() -> None: ...
def run_queue_delay_ns() -> int: ...
def instruction_sets() -> list[str]:
    """Those that this processor runs, slowest first. One is an emulation, never the last."""

def block_instruction_sets() -> list[str]:
    """The same for products of weights in blocks."""

def has_matrix_units() -> bool:
    """Whether the processor multiplies matrices of bf16 (AMX)."""
