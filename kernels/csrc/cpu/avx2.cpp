// AVX2 and FMA.
#include "asp_cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>

namespace asp {
namespace {
struct S {
  static constexpr int LANES = 8;
  using R = __m256;
  using I = __m256i;
  using X = __m256;
  static R zero() { return _mm256_setzero_ps(); }
  static R load(const float* p) { return _mm256_loadu_ps(p); }
  static I load_i(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store(float* p, R a) { _mm256_storeu_ps(p, a); }
  static R set(float a) { return _mm256_set1_ps(a); }
  static R add(R a, R b) { return _mm256_add_ps(a, b); }
  static R fma(R a, R b, R c) { return _mm256_fmadd_ps(a, b, c); }
  static I right(I a, int by) { return _mm256_srli_epi32(a, by); }
  static R low(I a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
  static R high(I a) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000u)))); }
  static X four(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  static R pick(X x, I places) { return _mm256_permutevar_ps(x, places); }
  static R gather(const float* p, int64_t s) {
    return _mm256_setr_ps(p[0], p[s], p[2 * s], p[3 * s], p[4 * s], p[5 * s], p[6 * s], p[7 * s]);
  }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
};
#include "linear_24.inl"
#include "mask.inl"

void decode(const Linear& a) { a.bf16 ? decode_any<true>(a) : decode_any<false>(a); }
void batch(const Linear& a) { a.bf16 ? batch_any<Widened<true>>(a) : batch_any<Widened<false>>(a); }

// Two groups of four: -1 where the entry stays.
inline __m256i keep(const void* scores, int bytes, int64_t at, __m256i limit) {
  __m256i bits, magnitude;
  if (bytes == 4) {
    bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(scores) + 4 * at));
    magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  } else {
    bits = _mm256_cvtepi16_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(scores) + 2 * at)));
    magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff));
  }
  const __m256i sign = _mm256_srai_epi32(bits, 31);
  const __m256i k = _mm256_sub_epi32(_mm256_xor_si256(magnitude, sign), sign);
  // Lane i meets lane (i + d) % 4; where that is a lower one, a tie beats it too: k + (-1) < other.
  const __m256i b1 = _mm256_add_epi32(k, _mm256_setr_epi32(0, 0, 0, -1, 0, 0, 0, -1));
  const __m256i b2 = _mm256_add_epi32(k, _mm256_setr_epi32(0, 0, -1, -1, 0, 0, -1, -1));
  const __m256i b3 = _mm256_add_epi32(k, _mm256_setr_epi32(0, -1, -1, -1, 0, -1, -1, -1));
  __m256i beaten = _mm256_cmpgt_epi32(_mm256_shuffle_epi32(k, 0x39), b1);  // -1 for each
  beaten = _mm256_add_epi32(beaten, _mm256_cmpgt_epi32(_mm256_shuffle_epi32(k, 0x4e), b2));
  beaten = _mm256_add_epi32(beaten, _mm256_cmpgt_epi32(_mm256_shuffle_epi32(k, 0x93), b3));
  return _mm256_cmpgt_epi32(beaten, limit);
}

void mask(const void* scores, int bytes, uint8_t* out, int64_t groups, int n, int m) {
  if (m != 4) return mask_any(scores, bytes, out, 0, groups, n, m);
  const __m256i limit = _mm256_set1_epi32(-n), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int64_t g = 0;
  for (; g + 8 <= groups; g += 8) {
    const int64_t at = 4 * g;
    const __m256i a = _mm256_packs_epi32(keep(scores, bytes, at, limit), keep(scores, bytes, at + 8, limit));
    const __m256i b = _mm256_packs_epi32(keep(scores, bytes, at + 16, limit), keep(scores, bytes, at + 24, limit));
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 4 * g), _mm256_and_si256(all, _mm256_set1_epi8(1)));
  }
  mask_any(scores, bytes, out, g, groups, n, m);
}
}  // namespace

const Kernels kAvx2 = {decode, batch, pack, nullptr, mask, false};
}  // namespace asp
#endif
