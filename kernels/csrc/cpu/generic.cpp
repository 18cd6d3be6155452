// Any processor.
#include "asp_cpu.h"

namespace asp {
namespace {
struct S {
  static constexpr int LANES = 1;
  using R = float;
  using I = uint32_t;
  using X = const float*;
  static R zero() { return 0; }
  static R load(const float* p) { return *p; }
  static I load_i(const void* p) {
    uint32_t word;
    __builtin_memcpy(&word, p, 4);
    return word;
  }
  static void store(float* p, R a) { *p = a; }
  static R set(float a) { return a; }
  static R add(R a, R b) { return a + b; }
  static R fma(R a, R b, R c) { return a * b + c; }
  static I right(I a, int by) { return a >> by; }
  static R as_float(I a) {
    float value;
    __builtin_memcpy(&value, &a, 4);
    return value;
  }
  static R low(I a) { return as_float(a << 16); }
  static R high(I a) { return as_float(a & 0xffff0000u); }
  static X four(const float* p) { return p; }
  static R pick(X x, I places) { return x[places & 3]; }
  static R gather(const float* p, int64_t) { return *p; }
  static void prefetch(const void*) {}
};
#include "linear_24.inl"
#include "mask.inl"

void decode(const Linear& a) { a.bf16 ? decode_any<true>(a) : decode_any<false>(a); }
void batch(const Linear& a) { a.bf16 ? batch_any<Widened<true>>(a) : batch_any<Widened<false>>(a); }
void mask(const void* scores, int bytes, uint8_t* out, int64_t groups, int n, int m) {
  mask_any(scores, bytes, out, 0, groups, n, m);
}
}  // namespace

const Kernels kGeneric = {decode, batch, pack, nullptr, mask, false};
}  // namespace asp
