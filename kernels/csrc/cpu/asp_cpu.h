// What the translation units share. Each instruction set has its own unit, compiled with its own flags; all they define
// is static except one table of functions, so that the linker never puts code of one set into another.
#pragma once
#include <stdint.h>

namespace asp {

// A 2:4 weight in tiles of 16 output rows. A tile is a run of blocks, 32 columns (8 groups of 4) each:
//   16 words, one a row: bits 2j, 2j+1 are the place of group j's first kept entry, bits 16+2j, 16+2j+1 of its second
//   float:    values[8 groups][2 kept][16 rows]
//   bfloat16: words[8 groups][16 rows], the first kept entry in the low half
// Rows and columns beyond the matrix hold zeros at places 0 and 1.
constexpr int kRows = 16, kCols = 32, kGroups = 8, kSlots = 7;
constexpr int64_t kBlockF32 = 64 + kGroups * 2 * kRows * 4, kBlockBf16 = 64 + kGroups * kRows * 4;

// The product of rows [16 * first, 16 * last) of the weight.
struct Linear {
  const char* tiles;
  int64_t m, n, blocks;  // rows of x, rows of the weight, blocks of a tile
  const void* x;         // decode: (m, 32 * blocks), zero beyond the columns; batch: as `pack_*` leaves it
  int64_t first, last;   // tiles
  const void* bias;      // (n,) in y's type or null
  void* y;               // (m, n)
  float* scratch;        // batch: kPanel * 16 * 64 floats
  bool bf16_x;           // x is bfloat16 (pairs of it in the batch form), else float
  bool bf16;             // weight, bias and y are bfloat16, else float
};
constexpr int kPanel = 16;  // tiles whose sums of 64 samples stay in the second-level cache

struct Kernels {
  void (*decode)(const Linear&);                                             // m <= 8
  void (*batch)(const Linear&);                                              // any m
  void (*pack)(const void* x, int64_t m, int64_t k, int64_t stride, int64_t blocks, void* out);  // float -> [mb][k][w]
  void (*pack_pairs)(const void* x, int64_t m, int64_t k, int64_t stride, int64_t blocks, void* out);  // or null
  void (*mask)(const void* scores, int bytes, uint8_t* out, int64_t groups, int n, int m);
  bool dots;  // multiplies bfloat16 without widening it first
};

extern const Kernels kGeneric;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif

// Samples are taken 64 at a time, the rest 32 or 16.
inline static int width(int64_t left) { return left > 32 ? 64 : left > 16 ? 32 : 16; }

}  // namespace asp
