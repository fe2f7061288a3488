#include "dispatch.h"

#include <stdexcept>

#ifdef WINNOW_X86
#include <cpuid.h>
#endif

namespace winnow {

#define WINNOW_DECLARE(isa)                                                                              \
  namespace isa {                                                                                        \
  void write(const Cache &, const Batch &, int64_t, Heads, Heads, int);                                  \
  void compact(const Pool &, const int64_t *, const int64_t *, int64_t, int);                            \
  void attend(const Attend &, Workspace &);                                                              \
  void leverage(const KeyRows &, float, float *, int);                                                   \
  void key_difference(const KeyRows &, float *, int);                                                    \
  void pool_rows(const PooledRows &, float *, int);                                                      \
  void rms_norm(const NormRows &, const RmsNorm &, int);                                                 \
  void rotate(const RotaryRows &, const RmsNorm &, const RmsNorm &, int);                                \
  void gate(const GatedRows &, Activation, int);                                                         \
  int64_t packed_size(int64_t, int64_t);                                                                 \
  void pack(const PackedWeight &, const char *, int);                                                    \
  void linear(const PackedWeight &, const LinearRows &, int);                                            \
  void greedy(const LogitRows &, int64_t *, int);                                                        \
  const Kernels kernels{write,  compact, attend,      leverage, key_difference, pool_rows, rms_norm,     \
                        rotate, gate,    packed_size, pack,     linear,         greedy};                 \
  }

WINNOW_DECLARE(generic)
#ifdef WINNOW_X86
WINNOW_DECLARE(avx2)
WINNOW_DECLARE(avx512)
WINNOW_DECLARE(avx512_bf16)
#endif

namespace {

struct Level {
  const char *name;
  const Kernels *kernels;
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

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

const Level LEVELS[] = {
    {"generic", &generic::kernels, [] { return true; }},
#ifdef WINNOW_X86
    {"avx2", &avx2::kernels, has_avx2},
    {"avx512", &avx512::kernels, has_avx512},
    {"avx512_bf16", &avx512_bf16::kernels, has_avx512_bf16},
#endif
};

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Level &level : LEVELS)
    if (level.runs_here()) names.emplace_back(level.name);
  return names;
}

bool has_matrix_units() {
#ifdef WINNOW_X86
  unsigned a, b, c, d;
  constexpr unsigned AMX_BF16 = 1u << 22;  // of leaf 7, in edx
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16);
#else
  return false;
#endif
}

const Kernels &kernels_for(const std::string &name) {
  for (const Level &level : LEVELS)
    if (name == level.name && level.runs_here()) return *level.kernels;
  std::string known;
  for (const std::string &here : instruction_sets()) known += (known.empty() ? "" : ", ") + here;
  throw std::invalid_argument("instruction set must be one of " + known + ", got " + name);
}

}  // namespace winnow
