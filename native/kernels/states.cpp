// One step of layers that keep a state: each state is read from memory once and written once. Arithmetic is float.
// A head is one thread's work from end to end, so results depend neither on threads nor on the other sequences.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../layers.h"
#include "activation.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Vectors of a state's row whose sums stay in registers, twice.
constexpr int STRIP = WIDTH == 16 ? 8 : 4;

/// Elements of states below which waking other threads costs more than they save.
constexpr int64_t PARALLEL_FROM = 32768;

/// Calls body(first, count) for pieces of at most a register's width.
template <class F>
inline void pieces(int64_t n, F body) {
  for (int64_t i = 0; i < n; i += WIDTH) body(i, static_cast<int>(std::min<int64_t>(WIDTH, n - i)));
}

/// A vector as floats, scaled to `scale`, or to that length.
template <class T>
void read_scaled(const T *from, int64_t n, float scale, bool norm, float *to) {
  vf squares{};
  if (norm) pieces(n, [&](int64_t i, int m) { const vf x = get(from + i, m); squares += x * x; });
  if (norm) scale /= std::sqrt(horizontal_sum(squares) + 1e-6f);
  pieces(n, [&](int64_t i, int m) { put(to + i, get(from + i, m) * scale, m); });
}

/// What a head's states are multiplied with, [key_size] each.
struct HeadRows {
  const float *query, *key, *decay, *decayed_query, *decayed_key;
  int64_t size;
  float dot, rate;  // of query and key
};

/// VECTORS columns of a head's state, the last one of `n` lanes: read, changed while they are in the cache, and read out.
template <int VECTORS, class T>
inline void delta_columns(float *state, int64_t stride, const HeadRows &rows, const T *value, T *out, int n = WIDTH) {
  vf read[VECTORS] = {}, known[VECTORS] = {};
  for (int64_t i = 0; i < rows.size; ++i)
    for (int j = 0; j < VECTORS; ++j) {
      const vf s = get(state + i * stride + j * WIDTH, n);
      known[j] += s * rows.decayed_key[i];
      read[j] += s * rows.decayed_query[i];
    }
  vf delta[VECTORS];
  for (int j = 0; j < VECTORS; ++j) {
    delta[j] = (get(value + j * WIDTH, n) - known[j]) * rows.rate;
    put(out + j * WIDTH, read[j] + delta[j] * rows.dot, n);
  }
  for (int64_t i = 0; i < rows.size; ++i)
    for (int j = 0; j < VECTORS; ++j) {
      float *s = state + i * stride + j * WIDTH;
      put(s, get(s, n) * rows.decay[i] + delta[j] * rows.key[i], n);
    }
}

/// Sums over the inputs of one channel, which the newest joins. Of LENGTH inputs and taps; 0: as many as are named.
template <int LENGTH, class T>
inline float conv_channel(T *past, T newest, const T *weight, int64_t length, int64_t taps) {
  if (LENGTH) length = taps = LENGTH;
  for (int64_t i = 0; i + 1 < length; ++i) past[i] = past[i + 1];
  past[length - 1] = newest;
  float sum = 0.0f;
  for (int64_t tap = 0; tap < taps; ++tap) sum += to_float(weight[tap]) * to_float(past[length - taps + tap]);
  return sum;
}

constexpr int WORDS = WIDTH / 2;

/// The same of WORDS channels of four inputs each, which are one word, the newest highest.
inline void conv_words(bf16 *past, const bf16 *newest, const bf16 *weight, float *sums) {
  typedef uint64_t words __attribute__((vector_size(WORDS * 8)));
  typedef uint32_t halves __attribute__((vector_size(WORDS * 4)));
  typedef uint16_t quarters __attribute__((vector_size(WORDS * 2)));
  typedef float floats __attribute__((vector_size(WORDS * 4)));
  const auto tap_of = [](words each, int tap) {
    return (floats)(__builtin_convertvector(each >> (16 * tap), halves) << 16);
  };
  const words added = __builtin_convertvector(load_vector<quarters>(newest), words);
  const words now = load_vector<words>(past) >> 16 | added << 48, factors = load_vector<words>(weight);
  store_vector(past, now);
  floats sum{};
  for (int tap = 0; tap < 4; ++tap) sum += tap_of(now, tap) * tap_of(factors, tap);
  store_vector(sums, sum);
}

}  // namespace

void conv_step(const ConvStep &step, int threads) {
  constexpr int64_t CHANNELS = 512;  // of one piece of work
  const int64_t blocks = (step.channels + CHANNELS - 1) / CHANNELS, length = step.length, taps = step.taps;
  const bool of_four = length == 4 && taps == 4;
  with_type(step.dtype, [&](auto type) {
    using T = decltype(type);
    const T *weight = reinterpret_cast<const T *>(step.weight), *bias = reinterpret_cast<const T *>(step.bias);
#pragma omp parallel for num_threads(threads) if (step.state.seqs * step.channels * length >= PARALLEL_FROM)
    for (int64_t item = 0; item < step.state.seqs * blocks; ++item) {
      const int64_t seq = item / blocks, first = item % blocks * CHANNELS;
      const T *x = step.x.of<T>(seq);
      T *state = step.state.of<T>(seq), *out = reinterpret_cast<T *>(step.out) + seq * step.channels;
      for (int64_t at = first; at < std::min(first + CHANNELS, step.channels); at += WIDTH) {
        const int n = static_cast<int>(std::min<int64_t>(WIDTH, step.channels - at));
        float sums[WIDTH] = {};
        T *past = state + at * length;
        const T *factors = weight + at * taps;
        int i = 0;
        if constexpr (std::is_same_v<T, bf16>)
          for (; of_four && i + WORDS <= n; i += WORDS) conv_words(past + 4 * i, x + at + i, factors + 4 * i, sums + i);
        for (; i < n; ++i)
          sums[i] = (of_four ? conv_channel<4, T> : conv_channel<0, T>)(past + i * length, x[at + i], factors + i * taps,
                                                                        length, taps);
        const vf sum = load(sums) + (bias ? get(bias + at, n) : vf{});
        put(out + at, step.silu ? activate(sum, Activation::silu) : sum, n);
      }
    }
  });
}

void delta_step(const DeltaStep &step, int threads) {
  const int64_t keys = step.key_size, values = step.value_size, size = keys * values;
  with_type(step.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel num_threads(threads) if (step.state.seqs * step.heads * size >= PARALLEL_FROM)
    {
      std::vector<float> work(5 * keys);
      float *query = work.data(), *key = query + keys, *decay = key + keys;
      float *decayed_query = decay + keys, *decayed_key = decayed_query + keys;
#pragma omp for
      for (int64_t item = 0; item < step.state.seqs * step.heads; ++item) {
        const int64_t seq = item / step.heads, head = item % step.heads;
        const int64_t of_keys = head / (step.heads / step.key_heads) * keys;
        read_scaled(step.query.of<T>(seq) + of_keys, keys, 1.0f / std::sqrt(static_cast<float>(keys)), step.norm, query);
        read_scaled(step.key.of<T>(seq) + of_keys, keys, 1.0f, step.norm, key);
        const float *log_decay = step.log_decay + item * step.decay_size;
        vf dots{};
        pieces(keys, [&](int64_t i, int n) {
          const vf d = vexp(step.decay_size == 1 ? broadcast(*log_decay) : get(log_decay + i, n));
          const vf q = get(query + i, n), k = get(key + i, n);
          put(decay + i, d, n);
          put(decayed_query + i, q * d, n);
          put(decayed_key + i, k * d, n);
          dots += q * k;
        });
        const HeadRows rows{query, key, decay, decayed_query, decayed_key, keys, horizontal_sum(dots), step.rate[item]};
        float *state = step.state.of<float>(seq) + head * size;
        const T *value = step.value.of<T>(seq) + head * values;
        T *out = reinterpret_cast<T *>(step.out) + item * values;
        int64_t at = 0;
        for (; at + STRIP * WIDTH <= values; at += STRIP * WIDTH)
          delta_columns<STRIP>(state + at, values, rows, value + at, out + at);
        for (; at < values; at += WIDTH)
          delta_columns<1>(state + at, values, rows, value + at, out + at,
                           static_cast<int>(std::min<int64_t>(WIDTH, values - at)));
      }
    }
  });
}

void space_step(const SpaceStep &step, int threads) {
  const int64_t size = step.state_size, rows = step.head_size;
  const int64_t together = std::max<int64_t>(1, 64 / rows);  // heads of one piece of work
  const int64_t blocks = (step.heads + together - 1) / together;
  with_type(step.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel num_threads(threads) if (step.state.seqs * step.heads * rows * size >= PARALLEL_FROM)
    {
      std::vector<float> work(2 * size);
      float *b = work.data(), *c = b + size;
#pragma omp for
      for (int64_t item = 0; item < step.state.seqs * blocks; ++item) {
        const int64_t seq = item / blocks, first = item % blocks * together;
        int64_t group = -1;
        for (int64_t head = first; head < std::min(first + together, step.heads); ++head) {
          const int64_t own = head / (step.heads / step.groups);
          if (own != group) {
            group = own;
            read_scaled(step.b.of<T>(seq) + group * size, size, 1.0f, false, b);
            read_scaled(step.c.of<T>(seq) + group * size, size, 1.0f, false, c);
          }
          const float dt = step.dt[seq * step.heads + head], d = step.d ? step.d[head] : 0.0f;
          const float *a = step.a + head * step.a_size;
          const vf decay = vexp(broadcast(dt * *a));
          float *state = step.state.of<float>(seq) + head * rows * size;
          const T *x = step.x.of<T>(seq) + head * rows;
          T *out = reinterpret_cast<T *>(step.out) + (seq * step.heads + head) * rows;
          for (int64_t at = 0; at < rows; at += WIDTH) {
            const int n = static_cast<int>(std::min<int64_t>(WIDTH, rows - at));
            float inputs[WIDTH], outputs[WIDTH] = {};
            store(inputs, get(x + at, n));
            for (int row = 0; row < n; ++row) {
              const float added = dt * inputs[row];
              float *s = state + (at + row) * size;
              vf sum{};
              pieces(size, [&](int64_t i, int m) {
                const vf kept = step.a_size == 1 ? decay : vexp(get(a + i, m) * dt);
                const vf now = get(s + i, m) * kept + get(b + i, m) * added;
                put(s + i, now, m);
                sum += now * get(c + i, m);
              });
              outputs[row] = horizontal_sum(sum);
            }
            put(out + at, load(outputs) + load(inputs) * d, n);
          }
        }
      }
    }
  });
}

}  // namespace winnow::WINNOW_ISA
