// Body of the kernels of preview_kernels.h, under the rules of vector_impl.h.
#include "cpu/mixture_row_kernels_impl.h"
#include "cpu/vector_impl.h"

#if HSTREE_VECTOR_BYTES == 64
#define HSTREE_PREVIEW_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#else
#define HSTREE_PREVIEW_TARGET
#endif
#define HSTREE_PREVIEW_INLINE HSTREE_PREVIEW_TARGET __attribute__((always_inline)) static inline

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace preview {

// What `products` adds to the numbers of 8 bits: its instruction multiplies unsigned numbers with signed ones.
constexpr int32_t excess = HSTREE_VECTOR_BYTES == 64 ? 128 : 0;

// sum + the products of the 4 numbers of each lane, of 8 bits or, where small, of 0 to 15, with the 4 of a query.
template <bool small>
HSTREE_PREVIEW_INLINE I32 products(I32 sum, I32 rows, const int8_t* values) {
  int32_t query;
  __builtin_memcpy(&query, values, sizeof query);
#if HSTREE_VECTOR_BYTES == 64
  const __m512i from = bits_as<__m512i>(small ? rows : rows ^ static_cast<int32_t>(0x80808080u));
  return bits_as<I32>(_mm512_dpbusd_epi32(bits_as<__m512i>(sum), from, _mm512_set1_epi32(query)));
#elif HSTREE_VECTOR_BYTES == 32
  const __m256i from = bits_as<__m256i>(rows), with = _mm256_set1_epi32(query);
  // At most 2 * 128 * 127, so that sums of 16 bits never saturate.
  const __m256i pairs = small ? _mm256_maddubs_epi16(from, with)
                              : _mm256_maddubs_epi16(_mm256_abs_epi8(from), _mm256_sign_epi8(with, from));
  return sum + bits_as<I32>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(HSTREE_DOTPROD)
  // In place of vdotq_s32, which Clang before 16 declares only if all of a file may use it.
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(rows), "w"(splat<int32_t>(query)));
  return sum;
#else
  for (int shift = 0; shift < 32; shift += 8) {
    const I32 one = small ? (rows >> shift) & 15 : (rows << (24 - shift)) >> 24;
    sum += one * static_cast<int8_t>(query >> shift);
  }
  return sum;
#endif
}

// A vector of bytes. Not by memcpy, which GCC does in two halves through memory that it then reads as a whole: ten
// times the cycles.
HSTREE_PREVIEW_INLINE I32 load_words(const uint8_t* p) {
#if HSTREE_VECTOR_BYTES == 32
  return bits_as<I32>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  I32 words;
  __builtin_memcpy(&words, p, sizeof words);
  return words;
#endif
}

HSTREE_PREVIEW_INLINE float largest_of(Vector<float> v) {
#if HSTREE_VECTOR_BYTES >= 32
#if HSTREE_VECTOR_BYTES == 64
  const __m512 both = bits_as<__m512>(v);
  const __m256 all =
      _mm256_max_ps(_mm512_maskz_extractf32x8_ps(0xff, both, 0), _mm512_maskz_extractf32x8_ps(0xff, both, 1));
#else
  const __m256 all = bits_as<__m256>(v);
#endif
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#elif defined(__aarch64__)
  return vmaxvq_f32(bits_as<float32x4_t>(v));
#else
  float most = v[0];
  for (int i = 1; i < VectorOf<float>::width; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// The scores of `parts` vectors of classes for Q queries.
template <bool small, int Q, int parts>
HSTREE_PREVIEW_INLINE void tile(const Preview& p, const PreviewQueries& queries, int64_t part) {
  constexpr int64_t W = VectorOf<float>::width, per_block = 16 / W;
  const int64_t features = p.features(), ahead = parts * HSTREE_VECTOR_BYTES / 16 * 4 * p.groups;
  const uint8_t* rows[parts];
  I32 sums[parts][Q] = {};
  for (int i = 0; i < parts; ++i) {
    rows[i] = p.rows + (part + i) / per_block * p.groups * 64 + (part + i) % per_block * HSTREE_VECTOR_BYTES;
  }
  for (int64_t g = 0; g < p.groups; ++g) {
    I32 low[parts], high[parts];
#pragma GCC unroll 4
    for (int i = 0; i < parts; ++i) {
      low[i] = load_words(rows[i] + 64 * g);
      __builtin_prefetch(rows[i] + 64 * g + ahead);
      if constexpr (small) {
        high[i] = (low[i] >> 4) & 0x0f0f0f0f;
        low[i] &= 0x0f0f0f0f;
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const int8_t* const query = queries.values + q * features + g * (small ? 8 : 4);
#pragma GCC unroll 4
      for (int i = 0; i < parts; ++i) {
        sums[i][q] = products<small>(sums[i][q], low[i], query);
        if constexpr (small) sums[i][q] = products<small>(sums[i][q], high[i], query + 4);
      }
    }
  }
  for (int i = 0; i < parts; ++i) {
    const int64_t first = (part + i) * W;
    const Vector<float> scale = load(p.scale + first), offset = load(p.offset + first);
    for (int q = 0; q < Q; ++q) {
      const I32 sum = sums[i][q] - (small ? 8 : excess) * queries.sum[q];
      Vector<float> s = (offset + queries.shift[q]) +
                        scale * (__builtin_convertvector(sum, Vector<float>) * queries.step[q]);
      s = s == s ? s : splat(-__builtin_inff());
      store(queries.score + q * p.blocks * 16 + first, s);
      queries.largest[q * p.blocks * per_block + part + i] = largest_of(s);
    }
  }
}

template <bool small, int Q>
HSTREE_PREVIEW_TARGET static void scores_of(const Preview& p, const PreviewQueries& queries, int64_t begin,
                                            int64_t end) {
  // As many sums as hide the latency of a product and fit into the registers.
  constexpr int most = HSTREE_VECTOR_BYTES == 64 ? 16 : 8, parts = most / Q < 4 ? most / Q : 4;
  constexpr int64_t per_block = 16 / VectorOf<float>::width;
  int64_t part = begin * per_block;
  for (; part + parts <= end * per_block; part += parts) tile<small, Q, parts>(p, queries, part);
  for (; part < end * per_block; ++part) tile<small, Q, 1>(p, queries, part);
}

template <int Q>
static void scores_of_bits(const Preview& p, const PreviewQueries& queries, int64_t begin, int64_t end) {
  p.bits == 4 ? scores_of<true, Q>(p, queries, begin, end) : scores_of<false, Q>(p, queries, begin, end);
}

static void scores(const Preview& p, const PreviewQueries& queries, int64_t begin, int64_t end) {
  if (queries.count == 1) return scores_of_bits<1>(p, queries, begin, end);
  if (queries.count == 2) return scores_of_bits<2>(p, queries, begin, end);
  if (queries.count == 4) return scores_of_bits<4>(p, queries, begin, end);
  scores_of_bits<8>(p, queries, begin, end);
}

static float log_sum_exp(const float* z, int64_t count, float sharpness) {
  constexpr int64_t W = VectorOf<float>::width;
  const float most = mixture_row::largest(z, count);
  if (most == -__builtin_inff()) return most;
  const int64_t c = count - count % W;
  float sum = sum_of<float>(sum_of_vectors<float>(c, [&](int64_t at, Vector<float> part) {
    return part + exponential((load(z + at) - splat(most)) * sharpness);
  }));
  if (c < count) {
    const Vector<float> rest = exponential((load_first(z + c, count - c) - splat(most)) * sharpness);
    for (int64_t i = 0; i < count - c; ++i) sum += rest[i];
  }
  return most * sharpness + __builtin_logf(sum);
}

static constexpr PreviewKernels table = {VectorOf<float>::width, scores, log_sum_exp};

}  // namespace preview
}  // namespace HSTREE_CAPABILITY

template <>
const PreviewKernels& HSTREE_JOIN(kernels_, HSTREE_CAPABILITY)<PreviewKernels>() {
#if HSTREE_VECTOR_BYTES == 64
  if (!__builtin_cpu_supports("avx512vnni")) return kernels_avx2<PreviewKernels>();
#endif
  return HSTREE_CAPABILITY::preview::table;
}

}  // namespace hstree::cpu
