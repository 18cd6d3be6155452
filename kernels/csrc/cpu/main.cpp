// The C interface. Every size was checked by the caller; nothing here throws across it.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "asp_cpu.h"

namespace {
using namespace asp;

const Kernels& of(int level) {
#if defined(__x86_64__)
  if (level == 2) return kAvx512;
  if (level == 1) return kAvx2;
#endif
  (void)level;
  return kGeneric;
}

struct Buffer {  // 64-byte aligned, or null where memory is short
  void* at;
  explicit Buffer(int64_t bytes) : at(std::aligned_alloc(64, size_t((bytes + 127) / 64 * 64))) {}
  ~Buffer() { std::free(at); }
  Buffer(const Buffer&) = delete;
};

// GOMP_parallel of the OpenMP library that torch runs on, if it was found: its threads then work here too, rather than
// wait busily beside others of ours. A forked child has none of them and starts threads of its own.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
Parallel parallel = nullptr;
pid_t owner = 0;

// work(first, last) on shares of [0, count). Threads started here end with the call.
template <class Work>
void split(int64_t count, int threads, Work work) {
  struct Job {
    Work& work;
    int64_t count, parts;
    std::atomic<int64_t> next;
    static void run(void* at) {
      Job& job = *static_cast<Job*>(at);
      for (int64_t p; (p = job.next.fetch_add(1)) < job.parts;)
        job.work(job.count * p / job.parts, job.count * (p + 1) / job.parts);
    }
  } job{work, count, std::max<int64_t>(1, std::min<int64_t>(threads, count)), {0}};
  if (job.parts == 1) return work(0, count);
  if (parallel && getpid() == owner) return parallel(Job::run, &job, unsigned(job.parts), 0);
  std::vector<std::thread> others;
  try {
    while (int64_t(others.size()) + 1 < job.parts) others.emplace_back(Job::run, &job);
  } catch (const std::system_error&) {  // no more threads to be had: those that there are do all
  }
  Job::run(&job);
  for (auto& one : others) one.join();
}

float widen(uint16_t half) {
  const uint32_t word = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

int64_t blocks_of(int64_t k) { return (k + kCols - 1) / kCols; }
}  // namespace

extern "C" {

// The address of GOMP_parallel, once, before the first product.
void asp_parallel(void* function) {
  parallel = reinterpret_cast<Parallel>(function);
  owner = getpid();
}

// The highest level this processor runs: 0 generic, 1 AVX2 and FMA, 2 AVX-512 with BW, VL, DQ and BF16.
int asp_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

int64_t asp_tile_bytes(int64_t rows, int64_t cols, int bf16) {
  return (rows + kRows - 1) / kRows * blocks_of(cols) * (bf16 ? kBlockBf16 : kBlockF32);
}

// values (rows, cols / 2), codes (rows, ceil(cols / 8)), both contiguous, cols a multiple of 4 -> tiles.
// 1 where the codes of a group do not ascend: such tiles must not be used.
int asp_tiles_24(const void* values, const uint8_t* codes, int64_t rows, int64_t cols, int bf16, void* out) {
  const int64_t blocks = blocks_of(cols), step = bf16 ? kBlockBf16 : kBlockF32, bytes = (cols + 7) / 8;
  char* block = static_cast<char*>(out);
  for (int64_t t = 0; t * kRows < rows; ++t)
    for (int64_t b = 0; b < blocks; ++b, block += step) {
      std::memset(block, 0, size_t(step));
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = t * kRows + r;
        uint32_t places = 0;
        for (int j = 0; j < kGroups; ++j) {
          const int64_t g = b * kGroups + j;
          uint32_t first = 0, second = 1;
          if (row < rows && 4 * g < cols) {
            const int nibble = codes[row * bytes + g / 2] >> (g % 2 * 4) & 15;
            first = nibble & 3, second = nibble >> 2;
            if (first >= second) return 1;
            const int64_t from = row * (cols / 2) + 2 * g;
            if (bf16) {
              std::memcpy(block + 64 + (j * kRows + r) * 4, static_cast<const uint16_t*>(values) + from, 4);
            } else {
              const float* pair = static_cast<const float*>(values) + from;
              std::memcpy(block + 64 + (2 * j * kRows + r) * 4, pair, 4);
              std::memcpy(block + 64 + ((2 * j + 1) * kRows + r) * 4, pair + 1, 4);
            }
          }
          places |= first << (2 * j) | second << (16 + 2 * j);
        }
        std::memcpy(block + 4 * r, &places, 4);
      }
    }
  return 0;
}

// y (m, n) = x (m, k; rows `stride` apart) times the tiled (n, k) weight's transpose, plus bias (n,) or null.
// form: 0 decode (rows of x by eights), 1 batch (by 64, 32 or 16). Returns 1 where memory is short.
int asp_linear_24(int level, int bf16, const void* tiles, const void* x, int64_t m, int64_t n, int64_t k,
                  int64_t stride, const void* bias, void* y, int form, int threads) {
  const Kernels& kernels = of(level);
  const int64_t blocks = blocks_of(k), columns = blocks * kCols, count = (n + kRows - 1) / kRows;
  const bool dots = bf16 && kernels.dots, decode = form == 0 || k == 0;
  if (m == 0 || n == 0) return 0;
  Linear a{static_cast<const char*>(tiles), m, n, blocks, nullptr, 0, count, bias, y, nullptr, dots, bool(bf16)};

  Buffer plain((decode || (bf16 && !dots) ? m * columns * 4 : 0) + 64);  // x with its rows together, maybe widened
  if (!plain.at) return 1;
  if (decode || (bf16 && !dots)) {
    for (int64_t i = 0; i < m; ++i) {
      if (bf16 && !dots) {
        float* to = static_cast<float*>(plain.at) + i * columns;
        const uint16_t* from = static_cast<const uint16_t*>(x) + i * stride;
        for (int64_t c = 0; c < k; ++c) to[c] = widen(from[c]);
        std::fill(to + k, to + columns, 0.0f);
      } else {
        const int64_t size = bf16 ? 2 : 4;
        char* to = static_cast<char*>(plain.at) + i * columns * size;
        if (k) std::memcpy(to, static_cast<const char*>(x) + i * stride * size, size_t(k * size));
        std::memset(to + k * size, 0, size_t((columns - k) * size));
      }
    }
    x = plain.at, stride = columns;
  }
  if (decode) {
    a.x = x;
    split(count, threads, [&](int64_t first, int64_t last) {
      Linear own = a;
      const int64_t size = bf16 ? 2 : 4, each = dots ? 2 : 4;
      for (int64_t t = first; t < last; ++t)  // a tile meets all of x while it is in the caches
        for (int64_t done = 0; done < m; done += 8) {
          own.first = m > 8 ? t : first, own.last = m > 8 ? t + 1 : last;
          own.m = std::min<int64_t>(8, m - done);
          own.x = static_cast<const char*>(a.x) + done * columns * each;
          own.y = static_cast<char*>(a.y) + done * n * size;
          kernels.decode(own);
          if (m <= 8) return;
        }
    });
    return 0;
  }
  const int64_t samples = m / 64 * 64 + (m % 64 ? width(m % 64) : 0);
  Buffer packed(samples * 4 * (dots ? blocks * kGroups * kSlots : columns));
  const int64_t sums = kPanel * kRows * 64;
  Buffer scratch(sums * 4 * std::max(1, threads));
  if (!packed.at || !scratch.at) return 1;
  (dots ? kernels.pack_pairs : kernels.pack)(x, m, k, stride, blocks, packed.at);
  a.x = packed.at;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, count));
  split(parts, threads, [&](int64_t first, int64_t last) {
    Linear own = a;
    own.scratch = static_cast<float*>(scratch.at) + first * sums;
    own.first = count * first / parts, own.last = count * last / parts;
    kernels.batch(own);
  });
  return 0;
}

// scores (groups, m) of 4 bytes (float) or 2 (half, bfloat16) -> bytes, 1 for the n highest of each group.
void asp_nm_mask(int level, int bytes, const void* scores, uint8_t* out, int64_t groups, int n, int m, int threads) {
  const int64_t some = 64, pieces = (groups + some - 1) / some;
  split(pieces, threads, [&](int64_t first, int64_t last) {
    const int64_t from = first * some, to = std::min(groups, last * some);
    if (from < to)
      of(level).mask(static_cast<const char*>(scores) + from * m * bytes, bytes, out + from * m, to - from, n, m);
  });
}
}
