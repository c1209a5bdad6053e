// The XLA FFI target pearl_jax.grouped_matmul. `initialize` loads the kernel, so that `execute`
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
  text << "pearl_jax.grouped_matmul: ";
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
    return Unexpected(Fail(ffi::ErrorCode::kFailedPrecondition, Driver().error));
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
    return Unexpected(Fail(ffi::ErrorCode::kInternal, "finding the stream's device failed with ",
                           ResultText(result)));
  }

  const bool hopper = major == 9 && minor == 0;
  if (!hopper && major != 10) {
    return Unexpected(Fail(ffi::ErrorCode::kUnimplemented, "GPU ", context.device,
                           " has compute capability ", major, ".", minor,
                           ", but there are kernels for 9.0 (Hopper) and 10.x (Blackwell) only"));
  }
  const std::string_view name = hopper ? names.sm_90 : names.sm_100;
  if (name.empty()) {
    return Unexpected(Fail(ffi::ErrorCode::kUnimplemented, "no kernel was chosen for GPU ",
                           context.device, " of compute capability ", major, ".", minor));
  }
  Kernel* kernel = FindKernel(name);
  if (!kernel) {
    return Unexpected(
        Fail(ffi::ErrorCode::kNotFound, "there is no kernel ", name, " in this library"));
  }
  result = kernel->Load(context.device);
  if (result != CUDA_SUCCESS) {
    return Unexpected(Fail(ffi::ErrorCode::kInternal, "loading ", name, " to GPU ", context.device,
                           " failed with ", ResultText(result)));
  }
  return Loaded{kernel, context.device};
}

ffi::Error Initialize(CUstream stream, ffi::RemainingArgs, ffi::RemainingRets, KernelNames names) {
  auto loaded = Load(stream, names);
  return loaded.has_error() ? loaded.error() : ffi::Error::Success();
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                   ffi::BufferR2<ffi::S32> group_sizes, ffi::BufferR1<ffi::S32> group_offset,
                   ffi::BufferR2<ffi::S32> batch_index, ffi::Result<ffi::AnyBuffer> out,
                   KernelNames names) {
  if (out->element_count() == 0) return ffi::Error::Success();
  auto loaded = Load(stream, names);
  if (loaded.has_error()) return loaded.error();
  const Kernel& kernel = *loaded->kernel;

  auto fail = [&](ffi::ErrorCode code, const auto&... reason) {
    return Fail(code, reason..., " (", kernel.name, " with ", Describe("lhs", lhs), ", ",
                Describe("rhs", rhs), ", ", Describe("group_sizes", group_sizes), ", ",
                Describe("out", *out), ")");
  };
  const auto l = lhs.dimensions();
  const auto r = rhs.dimensions();
  const auto o = out->dimensions();
  const auto s = group_sizes.dimensions();
  const auto b = batch_index.dimensions();
  const bool transposed = kernel.form == Form::kDgrad;
  if (l.size() != 3 || r.size() != 4 || o.size() != 3 || b[0] != o[0] || b[1] != 4 ||
      l[1] != o[1] || r[transposed ? 2 : 3] != o[2] || r[transposed ? 3 : 2] != l[2] ||
      lhs.element_type() != kernel.dtype || rhs.element_type() != kernel.dtype ||
      out->element_type() != kernel.out_dtype) {
    return fail(ffi::ErrorCode::kInvalidArgument, "the operands are not what the kernel takes");
  }
  // Rows, columns and groups are counted in int32.
  const int64_t counts[] = {o[0] * o[1], l[0] * l[1], r[0] * r[1], s[0] * s[1], o[2], l[2]};
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
      .m = static_cast<int32_t>(o[1]),
      .n = static_cast<int32_t>(o[2]),
      .k = static_cast<int32_t>(l[2]),
      .num_groups = static_cast<int32_t>(r[1]),
      .num_sizes = static_cast<int32_t>(s[1]),
      .num_batches = static_cast<int32_t>(o[0]),
      .lhs_batches = static_cast<int32_t>(l[0]),
      .rhs_batches = static_cast<int32_t>(r[0]),
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(pearl_jax_grouped_matmul_initialize, pearl_jax::Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<pearl_jax::KernelNames>("kernels"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(pearl_jax_grouped_matmul_execute, pearl_jax::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()           // lhs
                                  .Arg<ffi::AnyBuffer>()           // rhs
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // group_sizes
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // group_offset
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // batch_index
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Attr<pearl_jax::KernelNames>("kernels"),
                              {ffi::Traits::kCmdBufferCompatible});
