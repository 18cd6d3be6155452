// N:M masks of any width: entry i stays when fewer than n others of its group beat it. j beats i when its key is
// higher, or equal with j < i. A key is the score's bits as an integer in the order of the scores; +0.0 and -0.0 are one key.

static inline int32_t key(const void* scores, int bytes, int64_t at) {
  if (bytes == 4) {
    int32_t bits;
    __builtin_memcpy(&bits, static_cast<const char*>(scores) + 4 * at, 4);
    const int32_t sign = bits >> 31;
    return ((bits & 0x7fffffff) ^ sign) - sign;
  }
  int16_t bits;
  __builtin_memcpy(&bits, static_cast<const char*>(scores) + 2 * at, 2);
  const int32_t sign = bits >> 15;
  return ((bits & 0x7fff) ^ sign) - sign;
}

template <int M>
static void mask_of(const void* scores, int bytes, uint8_t* out, int64_t first, int64_t last, int n, int width) {
  const int m = M ? M : width;
  int32_t keys[M ? M : 64];
  for (int64_t g = first; g < last; ++g) {
    for (int i = 0; i < m; ++i) keys[i] = key(scores, bytes, g * m + i);
    for (int i = 0; i < m; ++i) {
      int beaten = 0;
      for (int j = 0; j < i; ++j) beaten += keys[j] >= keys[i];
      for (int j = i + 1; j < m; ++j) beaten += keys[j] > keys[i];
      out[g * m + i] = beaten < n;
    }
  }
}

static void mask_any(const void* scores, int bytes, uint8_t* out, int64_t first, int64_t last, int n, int m) {
  if (m == 4) mask_of<4>(scores, bytes, out, first, last, n, m);
  else if (m == 8) mask_of<8>(scores, bytes, out, first, last, n, m);
  else mask_of<0>(scores, bytes, out, first, last, n, m);
}
