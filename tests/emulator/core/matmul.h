// Matrix operands in shared memory, and the product.
#pragma once
#include <vector>

#include "machine.h"

namespace emu {

// A shared-memory matrix descriptor, wgmma's or tcgen05's.
struct MatrixDescriptor {
  u32 start, leading, stride;  // bytes
  u32 span;                    // swizzle span in bytes; 16: none
};

MatrixDescriptor decode_wgmma_descriptor(u64 bits);
MatrixDescriptor decode_tcgen05_descriptor(u64 bits);

// 32 bytes along K of `rows` rows (of M or N) in shared memory.
struct MatrixSource {
  Cta* cta;
  MatrixDescriptor d;
  u32 rows;
  bool mn_major;
  Type type;
};

u32 element_bytes(Type t);
float element_value(Type t, const u8* bytes);

// Calls f(offset in the CTA, row, k) for each 16-byte chunk; f gets the first row and k of it.
template <class F>
void each_chunk(const MatrixSource& s, F f) {
  const MatrixDescriptor& d = s.d;
  u32 e = element_bytes(s.type), per_chunk = 16 / e, deep = 32 / e;
  if (!s.mn_major) {
    for (u32 r = 0; r < s.rows; r++) {
      for (u32 c = 0; c < 2; c++) {
        u32 at = d.span == 16 ? d.start + r / 8 * d.stride + c * d.leading + r % 8 * 16
                              : d.start + r / 8 * d.stride + r % 8 * d.span + c * 16;
        f(swizzle_address(at, d.span), r, c * per_chunk);
      }
    }
  } else {
    u32 wide = d.span / e;
    for (u32 k = 0; k < deep; k++) {
      for (u32 r = 0; r < s.rows; r += per_chunk) {
        u32 at = d.start + k % 8 * d.span + r % wide * e;
        at += d.span == 16 ? r / wide * d.stride + k / 8 * d.leading
                           : r / wide * d.leading + k / 8 * d.stride;
        f(swizzle_address(at, d.span), r, k);
      }
    }
  }
}

// The source as float32: out[row * stride + k], or out[k * stride + row] when `transposed`.
void read_matrix(const MatrixSource& s, bool transposed, u32 stride, float* out);

// The tensor core's sum of one block of 32 bytes along K. All products and the accumulator are
// aligned to the largest exponent among them (that of a product is the sum of its factors'
// exponents), cut off `kept` bits below it, added exactly, and the sum is cut off to float32, or
// to fewer bits. This is what an H200 does, bit for bit, with 16-bit and 8-bit floats; that other
// types and Blackwell do the same is an assumption.
class ProductBlock {
 public:
  // `columns` columns of B, as float32 [k][column].
  ProductBlock(Type element, std::vector<float> b, u32 columns);

  // d[column] += sum over k of a[k] b[k][column].
  void accumulate(float* d, const float* a);

 private:
  void accumulate_plainly(float* d, const float* a);

  u32 columns_, depth_;
  int kept_, result_bits_;
  bool special_;  // there are infinities, NaN or exponents at the edge of float32
  std::vector<float> b_, scale_;
  std::vector<i32> exponent_, largest_, low_, high_;
};

}  // namespace emu
