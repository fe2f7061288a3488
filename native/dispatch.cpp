#include "dispatch.h"

#include <stdexcept>

#ifdef WINNOW_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace winnow {

#define WINNOW_DECLARE(isa)                                                                              \
  namespace isa {                                                                                        \
  void write(const Cache &, const Batch &, const NewKVs &, int);                                         \
  void compact(const Pool &, const int64_t *, const int64_t *, int64_t, int);                            \
  void keep_best(const Pool &, const RankedRows &, int);                                                 \
  void attend(const Attend &, Workspace &);                                                              \
  ValuesRead attend_selected(const Attend &, const Selection &, Workspace &);                            \
  void replay(const Replay &, Workspace &);                                                              \
  void leverage(const KeyRows &, float, float *, int);                                                   \
  void key_difference(const KeyRows &, const KeyDirections &, float *, int);                             \
  void smooth_rows(const SmoothedRows &, float *, int);                                                      \
  void rms_norm(const NormRows &, const RmsNorm &, int);                                                 \
  void add_normed(const AddedRows &, const RmsNorm &, int);                                              \
  void rotate(const RotaryRows &, const RmsNorm &, const RmsNorm &, int);                                \
  void gate(const GatedRows &, Activation, int);                                                         \
  int64_t packed_size(int64_t, int64_t);                                                                 \
  void pack(const PackedWeight &, const char *, int);                                                    \
  void unpack_rows(const PackedWeight &, const int64_t *, int64_t, char *, int);                         \
  void linear(const PackedWeight &, const LinearRows &, int);                                            \
  bool gates(int64_t);                                                                                   \
  void gated_linear(const PackedWeight &, const LinearRows &, Activation, int);                          \
  void greedy(const LogitRows &, int64_t *, int);                                                        \
  void conv_step(const ConvStep &, int);                                                                 \
  void delta_step(const DeltaStep &, int);                                                               \
  void space_step(const SpaceStep &, int);                                                               \
  const Kernels kernels{write, compact, keep_best, attend, attend_selected, replay, leverage,            \
                        key_difference, smooth_rows, rms_norm, add_normed, rotate, gate, greedy,         \
                        conv_step, delta_step, space_step,                                               \
                        {packed_size, pack, unpack_rows, linear, gates, gated_linear}, block_products};   \
  }

namespace generic { extern const BlockProducts block_products; }
WINNOW_DECLARE(generic)
#ifdef WINNOW_X86
namespace avx2 { extern const BlockProducts block_products; }
namespace evex_vnni { extern const BlockProducts block_products; }
namespace avx512 { using avx2::block_products; }
namespace avx512_bf16 { using evex_vnni::block_products; }
WINNOW_DECLARE(avx2)
WINNOW_DECLARE(avx512)
WINNOW_DECLARE(avx512_bf16)
#ifdef WINNOW_AVX_VNNI
namespace avx2_vnni { extern const BlockProducts block_products; }
#endif
namespace avx512_vnni {
void attend(const Attend &, Workspace &);
}
#define WINNOW_DECLARE_TILED(isa)                                               \
  namespace isa {                                                               \
  void attend(const Attend &, Workspace &);                                     \
  void replay(const Replay &, Workspace &);                                     \
  void linear(const PackedWeight &, const LinearRows &, int);                   \
  void gated_linear(const PackedWeight &, const LinearRows &, Activation, int); \
  }

#ifdef WINNOW_HAS_EMULATED_TILES
namespace amx_emulated { extern const BlockProducts block_products; }
WINNOW_DECLARE_TILED(amx_emulated)
#endif
#ifdef WINNOW_AMX
namespace amx { extern const BlockProducts block_products; }
WINNOW_DECLARE_TILED(amx)
#endif

/// The sequences of a batch with more query rows than `rows`, or with no more; tokens keep their numbers.
static Batch sequences_of(const Attend &call, int64_t rows, bool more) {
  const Batch &all = call.batch;
  Batch some;
  some.position = all.position, some.observers = all.observers;
  for (int64_t i = 0; i < all.num_seqs(); ++i)
    if ((all.counts[i] * call.group() > rows) == more) some.add(all, i, all.starts[i]);
  return some;
}

/// Attention over coded KVs: chunks are multiplied as bf16, few rows as integers or as AVX-512 decodes in registers. What a
/// sequence gets does not depend on the others.
static void attend_coded(const Attend &call, Workspace &work, void (*attend_bf16)(const Attend &, Workspace &)) {
  constexpr int64_t FEW_ROWS = 16;
  for (const bool more : {false, true}) {
    const Batch batch = sequences_of(call, FEW_ROWS, more);
    if (batch.num_seqs() == 0) continue;
    (more ? attend_bf16 : avx512_vnni::attend)({call,      call.cache, batch,    call.layer,           call.dtype,
                                           call.q,    call.out,   call.num_query_heads, call.threads, call.read},
                                          work);
  }
}

/// The kernels of an instruction set that multiplies bf16. Attention where activations have another format, or plain KVs, is
/// that of AVX-512; all else is that of AVX512-BF16.
template <void (*attend)(const Attend &, Workspace &), void (*replay)(const Replay &, Workspace &)>
static Kernels attending_bf16(const BlockProducts &blocks) {
  Kernels kernels = avx512_bf16::kernels;
  kernels.blocks = blocks;
  static constexpr auto is_bf16 = [](const auto &call) {
    return call.dtype == DType::bf16 && (call.cache.coded || call.cache.dtype == DType::bf16);
  };
  kernels.attend = [](const Attend &call, Workspace &work) {
    if (!is_bf16(call)) return avx512::attend(call, work);
    call.cache.coded ? attend_coded(call, work, attend) : attend(call, work);
  };
  kernels.replay = [](const Replay &call, Workspace &work) {
    (is_bf16(call) ? replay : avx512::replay)(call, work);
  };
  return kernels;
}

static const Kernels AVX512_BF16 = attending_bf16<avx512_bf16::attend, avx512_bf16::replay>(avx512_bf16::block_products);

/// The kernels of a processor with tile registers. Linear layers of bf16 are multiplied there, too.
#define WINNOW_TILED(isa)                                                                                      \
  [] {                                                                                                         \
    Kernels kernels = attending_bf16<isa::attend, isa::replay>(isa::block_products);                            \
    kernels.plain.linear = [](const PackedWeight &weight, const LinearRows &rows, int threads) {               \
      (weight.dtype == DType::bf16 ? isa::linear : avx512_bf16::linear)(weight, rows, threads);                \
    };                                                                                                         \
    kernels.plain.gated_linear = [](const PackedWeight &weight, const LinearRows &rows, Activation activation, \
                                    int threads) {                                                             \
      const auto tiled = weight.dtype == DType::bf16 ? isa::gated_linear : avx512_bf16::gated_linear;          \
      tiled(weight, rows, activation, threads);                                                                \
    };                                                                                                         \
    return kernels;                                                                                            \
  }()

#ifdef WINNOW_HAS_EMULATED_TILES
static const Kernels AMX_EMULATED = WINNOW_TILED(amx_emulated);
#endif
#ifdef WINNOW_AMX
static const Kernels AMX = WINNOW_TILED(amx);
#endif
#endif

namespace {

/// What an instruction set's name stands for.
template <class T>
struct Level {
  const char *name;
  const T *part;
  bool (*runs_here)();
};

#ifdef WINNOW_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

#ifdef WINNOW_AVX_VNNI
bool has_avx2_vnni() {
  constexpr unsigned AVX_VNNI = 1u << 4;
  unsigned a, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI);
}
#endif
#endif

#ifdef WINNOW_AMX
/// Whether the system keeps tile registers when it switches between threads: bits of XCR0.
bool system_keeps_tiles() {
  constexpr unsigned TILE_CONFIG = 1u << 17, TILE_DATA = 1u << 18;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  asm("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & TILE_CONFIG) && (a & TILE_DATA);
}

/// Tile registers are large: Linux gives them to processes that ask.
bool may_use_tiles() {
#ifdef __linux__
  constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25, NEEDED = AMX_BF16 | AMX_TILE | AMX_INT8;
  unsigned a, b, c, d;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & NEEDED) != NEEDED) return false;
  return system_keeps_tiles() && may_use_tiles();
}
#endif

const Level<Kernels> LEVELS[] = {
    {"generic", &generic::kernels, [] { return true; }},
#ifdef WINNOW_X86
    {"avx2", &avx2::kernels, has_avx2},
    {"avx512", &avx512::kernels, has_avx512},
#ifdef WINNOW_HAS_EMULATED_TILES
    {"amx_emulated", &AMX_EMULATED, has_avx512_bf16},  // for tests; the next one runs wherever it does
#endif
    {"avx512_bf16", &AVX512_BF16, has_avx512_bf16},
#endif
#ifdef WINNOW_AMX
    {"amx", &AMX, has_amx},
#endif
};

const Level<BlockProducts> BLOCK_LEVELS[] = {
    {"generic", &generic::block_products, [] { return true; }},
#ifdef WINNOW_X86
#ifdef WINNOW_HAS_EMULATED_TILES
    {"amx_emulated", &amx_emulated::block_products, has_avx512_bf16},
#endif
    {"avx2", &avx2::block_products, has_avx2},
    {"avx512_vnni", &evex_vnni::block_products, has_avx512_vnni},
#ifdef WINNOW_AVX_VNNI
    {"avx2_vnni", &avx2_vnni::block_products, has_avx2_vnni},
#endif
#endif
#ifdef WINNOW_AMX
    {"amx", &amx::block_products, has_amx},
#endif
};

template <class T>
std::vector<std::string> names_here(const T &levels) {
  std::vector<std::string> names;
  for (const auto &level : levels)
    if (level.runs_here()) names.emplace_back(level.name);
  return names;
}

template <class T>
const auto &find(const T &levels, const std::string &name) {
  for (const auto &level : levels)
    if (name == level.name && level.runs_here()) return *level.part;
  std::string known;
  for (const std::string &here : names_here(levels)) known += (known.empty() ? "" : ", ") + here;
  throw std::invalid_argument("instruction set must be one of " + known + ", got " + name);
}

}  // namespace

std::vector<std::string> instruction_sets() { return names_here(LEVELS); }

std::vector<std::string> block_instruction_sets() { return names_here(BLOCK_LEVELS); }

Kernels kernels_for(const std::string &name, const std::string &block_name) {
  Kernels kernels = find(LEVELS, name);
  if (!block_name.empty()) kernels.blocks = find(BLOCK_LEVELS, block_name);
  return kernels;
}

namespace {

/// KVs that a sequence has in a layer.
int64_t num_kvs(const Cache &cache, int64_t slot, int64_t layer) {
  int64_t count = 0;
  for (int64_t head = 0; head < cache.num_heads; ++head) count += Row(cache, slot, layer, head).length;
  return count;
}

}  // namespace

ValuesRead attend_selected(const Kernels &kernels, const Attend &call, const Selection &selection, Workspace &work) {
  const Batch &batch = call.batch;
  std::vector<bool> reads_all(batch.num_tokens());
  int64_t in_full = 0, observed = 0;
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    const int64_t end = batch.starts[seq] + batch.counts[seq];
    bool any = false;
    observed += batch.observer[seq] >= 0;
    for (int64_t token = batch.starts[seq]; token < end; ++token) {
      reads_all[token] = !selection.selects(batch, seq, token) && !(call.read && !(*call.read)[token]);
      any |= reads_all[token];
    }
    if (any) in_full += num_kvs(call.cache, batch.slots[seq], call.layer);
  }
  // First: it writes outputs of tokens whose weights are observed, too.
  if (in_full || observed) {
    Attend rest = call;
    rest.read = &reads_all;
    kernels.attend(rest, work);
  }
  ValuesRead read = kernels.attend_selected(call, selection, work);
  read.in_full = in_full;
  return read;
}

}  // namespace winnow
