// The handlers of the XLA FFI targets pearl_jax.grouped_matmul and pearl_jax.grouped_outer; the
// kernel's form says which of the two a call is. `initialize` loads the kernel, so that `execute`
// only launches, which a CUDA graph may capture.

#include <algorithm>
#include <sstream>
#include <string_view>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pearl_jax {

// The attribute `kernels`: one kernel for each architecture family, "" where there is none.
struct KernelNames {
  std::string_view sm_90;
  std::string_view sm_100;
};

}  // namespace pearl_jax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(pearl_jax::KernelNames,
                                      ::xla::ffi::StructMember<std::string_view>("sm_90"),
                                      ::xla::ffi::StructMember<std::string_view>("sm_100"));

namespace pearl_jax {
namespace {

template <typename... Parts>
ffi::Error Fail(ffi::ErrorCode code, const Parts&... parts) {
  std::ostringstream text;
  text << "pearl_jax";
  (text << ... << parts);
  return ffi::Error(code, text.str());
}

// "lhs BF16[1,64,128]".
template <typename Buffer>
std::string Describe(const char* name, const Buffer& buffer) {
  std::ostringstream text;
  text << name << " " << buffer.element_type();
  const char* separator = "[";
  for (int64_t size : buffer.dimensions()) {
    text << separator << size;
    separator = ",";
  }
  text << "]";
  return text.str();
}

// Makes the context of a stream current as long as it lives.
class StreamContext {
 public:
  explicit StreamContext(CUstream stream) {
    CUcontext context = nullptr;
    result = Driver().cuStreamGetCtx(stream, &context);
    if (result != CUDA_SUCCESS) return;
    result = Driver().cuCtxPushCurrent_v2(context);
    if (result != CUDA_SUCCESS) return;
    pushed_ = true;
    result = Driver().cuCtxGetDevice(&device);
  }
  ~StreamContext() {
    CUcontext popped = nullptr;
    if (pushed_) Driver().cuCtxPopCurrent_v2(&popped);
  }
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

  CUresult result;
  CUdevice device = -1;

 private:
  bool pushed_ = false;
};

struct Loaded {
  Kernel* kernel;
  CUdevice device;
};

// The kernel for the device of the stream, loaded to it.
ffi::ErrorOr<Loaded> Load(CUstream stream, const KernelNames& names) {
  using ffi::Unexpected;
  if (!Driver().error.empty()) {
    return Unexpected(Fail(ffi::ErrorCode::kFailedPrecondition, ": ", Driver().error));
  }
  StreamContext context(stream);
  int major = 0;
  int minor = 0;
  CUresult result = context.result;
  if (result == CUDA_SUCCESS) {
    result = Driver().cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                                           context.device);
  }
  if (result == CUDA_SUCCESS) {
    result = Driver().cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                           context.device);
  }
  if (result != CUDA_SUCCESS) {
    return Unexpected(Fail(ffi::ErrorCode::kInternal, ": finding the stream's device failed with ",
                           ResultText(result)));
  }

  const bool hopper = major == 9 && minor == 0;
  if (!hopper && major != 10) {
    return Unexpected(Fail(ffi::ErrorCode::kUnimplemented, ": GPU ", context.device,
                           " has compute capability ", major, ".", minor,
                           ", but there are kernels for 9.0 (Hopper) and 10.x (Blackwell) only"));
  }
  const std::string_view name = hopper ? names.sm_90 : names.sm_100;
  if (name.empty()) {
    return Unexpected(Fail(ffi::ErrorCode::kUnimplemented, ": no kernel was chosen for GPU ",
                           context.device, " of compute capability ", major, ".", minor));
  }
  Kernel* kernel = FindKernel(name);
  if (!kernel) {
    return Unexpected(
        Fail(ffi::ErrorCode::kNotFound, ": there is no kernel ", name, " in this library"));
  }
  result = kernel->Load(context.device);
  if (result != CUDA_SUCCESS) {
    return Unexpected(Fail(ffi::ErrorCode::kInternal, ": loading ", name, " to GPU ",
                           context.device, " failed with ", ResultText(result)));
  }
  return Loaded{kernel, context.device};
}

ffi::Error Initialize(CUstream stream, ffi::RemainingArgs, ffi::RemainingRets, KernelNames names) {
  auto loaded = Load(stream, names);
  return loaded.has_error() ? loaded.error() : ffi::Error::Success();
}

// The sizes of a problem, and whether the operands are as they should be.
struct Sizes {
  bool valid;
  int64_t m, n, k, num_groups, reduced;
};

template <typename Span>
Sizes SizesOfMatmul(bool transposed, Span l, Span r, Span b, Span o) {
  if (l.size() != 3 || r.size() != 4 || o.size() != 3) return {};
  const int64_t m = o[1];
  const int64_t n = o[2];
  const int64_t k = l[2];
  const bool valid =
      b[0] == o[0] && l[1] == m && r[2] == (transposed ? n : k) && r[3] == (transposed ? k : n);
  return {valid, m, n, k, r[1], 1};
}

template <typename Span>
Sizes SizesOfOuter(Span l, Span r, Span b, Span o) {
  if (l.size() != 3 || r.size() != 3 || o.size() != 4) return {};
  const int64_t m = l[1];
  const int64_t k = o[2];
  const int64_t n = o[3];
  const bool valid = b[0] % o[0] == 0 && r[1] == m && l[2] == k && r[2] == n;
  return {valid, m, n, k, o[1], b[0] / o[0]};
}

// `old`, if there is one, is what the result is added to; it is the same memory as out. An outer
// product has one more result, `partial`, to keep sums in.
ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                   ffi::BufferR2<ffi::S32> group_sizes, ffi::BufferR1<ffi::S32> group_offset,
                   ffi::BufferR2<ffi::S32> batch_index, ffi::RemainingArgs old,
                   ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets partial, KernelNames names) {
  if (out->element_count() == 0) return ffi::Error::Success();
  auto loaded = Load(stream, names);
  if (loaded.has_error()) return loaded.error();
  const Kernel& kernel = *loaded->kernel;
  const bool outer = kernel.form == Form::kWgrad;

  auto fail = [&](ffi::ErrorCode code, const auto&... reason) {
    return Fail(code, outer ? ".grouped_outer: " : ".grouped_matmul: ", reason..., " (",
                kernel.name, " with ", Describe("lhs", lhs), ", ", Describe("rhs", rhs), ", ",
                Describe("group_sizes", group_sizes), ", ", Describe("out", *out), ")");
  };
  const auto l = lhs.dimensions();
  const auto r = rhs.dimensions();
  const auto o = out->dimensions();
  const auto s = group_sizes.dimensions();
  const auto b = batch_index.dimensions();
  const Sizes sizes =
      outer ? SizesOfOuter(l, r, b, o) : SizesOfMatmul(kernel.form == Form::kDgrad, l, r, b, o);
  bool aliased = true;
  for (size_t i = 0; i < old.size(); ++i) {
    auto buffer = old.get<ffi::AnyBuffer>(i);
    aliased = outer && buffer.has_value() && buffer->untyped_data() == out->untyped_data();
  }
  if (!sizes.valid || !aliased || old.size() > 1 || partial.size() != outer || b[1] != 4 ||
      lhs.element_type() != kernel.dtype || rhs.element_type() != kernel.dtype ||
      out->element_type() != kernel.out_dtype) {
    return fail(ffi::ErrorCode::kInvalidArgument, "the operands are not what the kernel takes");
  }
  // Rows, columns, groups and tiles are counted in int32.
  const int64_t counts[] = {
      b[0] * sizes.m,          l[0] * l[1], r[0] * r[1], s[0] * s[1], sizes.n, sizes.k,
      o[0] * sizes.num_groups,
  };
  const auto [least, most] = std::minmax_element(std::begin(counts), std::end(counts));
  if (*least < 1 || *most >= int64_t{1} << 31) {
    return fail(ffi::ErrorCode::kInvalidArgument,
                "rows, columns and groups of all batches together must be 1 to 2^31 - 1");
  }
  auto misaligned = [](const void* data, int bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes != 0;
  };
  if (misaligned(lhs.untyped_data(), 16) || misaligned(rhs.untyped_data(), 16)) {
    return fail(ffi::ErrorCode::kInvalidArgument, "an operand is not aligned to 16 bytes");
  }
  if (misaligned(out->untyped_data(), 32)) {
    return fail(ffi::ErrorCode::kInvalidArgument, "the result is not aligned to 32 bytes");
  }

  LaunchArguments arguments{
      .lhs = lhs.untyped_data(),
      .rhs = rhs.untyped_data(),
      .group_sizes = group_sizes.untyped_data(),
      .group_offset = group_offset.untyped_data(),
      .batch_index = batch_index.untyped_data(),
      .out = out->untyped_data(),
      .partial = outer ? (*partial.get<ffi::AnyBuffer>(0))->untyped_data() : nullptr,
      .m = static_cast<int32_t>(sizes.m),
      .n = static_cast<int32_t>(sizes.n),
      .k = static_cast<int32_t>(sizes.k),
      .num_groups = static_cast<int32_t>(sizes.num_groups),
      .num_sizes = static_cast<int32_t>(s[1]),
      .num_batches = static_cast<int32_t>(o[0]),
      .lhs_batches = static_cast<int32_t>(l[0]),
      .rhs_batches = static_cast<int32_t>(r[0]),
      .reduced = static_cast<int32_t>(sizes.reduced),
      .accumulate = static_cast<int32_t>(old.size()),
      .num_sms = 0,
      .stream = stream,
  };
  CUresult result = Driver().cuDeviceGetAttribute(
      &arguments.num_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, loaded->device);
  if (result == CUDA_SUCCESS) result = kernel.Launch(arguments);
  if (result != CUDA_SUCCESS) {
    return fail(ffi::ErrorCode::kInternal, "the launch failed with ", ResultText(result));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pearl_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pearl_jax_initialize, pearl_jax::Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<pearl_jax::KernelNames>("kernels"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(pearl_jax_execute, pearl_jax::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()           // lhs
                                  .Arg<ffi::AnyBuffer>()           // rhs
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // group_sizes
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // group_offset
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // batch_index
                                  .RemainingArgs()                 // old, or nothing
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .RemainingRets()                 // partial, or nothing
                                  .Attr<pearl_jax::KernelNames>("kernels"),
                              {ffi::Traits::kCmdBufferCompatible});
