"""Runs on a real GPU just what the emulator runs: the recorded launches, over the CUDA driver."""

import ctypes

import numpy as np

from .emulator import Kernel
from .launch import CLUSTER_DIMENSION, Attribute, Launch, LaunchConfig


class Gpu:
    """The first GPU, by way of its driver alone."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments) -> None:
        if error := getattr(self.driver, name)(*arguments):
            raise RuntimeError(f"{name} returned the CUDA error {error}")

    def run(self, kernel: Kernel, values: list, sm_count: int = 4) -> list[np.ndarray]:
        """The arrays among `values` after the call, as `emulate` returns them."""
        arrays = [np.ascontiguousarray(v) for v in values if isinstance(v, np.ndarray)]
        memories = []
        for array in arrays:
            address = ctypes.c_uint64()
            self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 1)))
            data = ctypes.c_void_p(array.ctypes.data)
            self("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(array.nbytes))
            memories.append(address)
        given = iter(memories)
        raw = [next(given).value if isinstance(v, np.ndarray) else int(v) for v in values]
        launches, cubin = kernel.exported.record(raw, sm_count, kernel.parameter_sizes)
        module = ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), cubin)
        for launch in launches:
            self.launch(module, launch)
        self("cuCtxSynchronize")
        outputs = [np.empty_like(array) for array in arrays]
        for output, address in zip(outputs, memories):
            data = ctypes.c_void_p(output.ctypes.data)
            self("cuMemcpyDtoH_v2", data, address, ctypes.c_size_t(output.nbytes))
            self("cuMemFree_v2", address)
        self("cuModuleUnload", module)
        return outputs

    def launch(self, module: ctypes.c_void_p, launch: Launch) -> None:
        function = ctypes.c_void_p()
        self("cuModuleGetFunction", ctypes.byref(function), module, launch.kernel.encode())
        max_dynamic_smem = 8
        self("cuFuncSetAttribute", function, max_dynamic_smem, launch.dynamic_smem)
        cluster = Attribute(CLUSTER_DIMENSION, 0, (*launch.cluster, *(0,) * 13))
        attributes = ctypes.pointer(cluster)
        config = LaunchConfig(launch.grid, launch.block, launch.dynamic_smem, None, attributes, 1)
        # Tensor maps are aligned to 64 bytes on the host too.
        buffers = [np.zeros(len(p) + 64, np.uint8) for p in launch.params]
        pointers = (ctypes.c_void_p * len(buffers))()
        for i, (buffer, param) in enumerate(zip(buffers, launch.params)):
            start = -buffer.ctypes.data % 64
            buffer[start : start + len(param)] = np.frombuffer(param, np.uint8)
            pointers[i] = buffer.ctypes.data + start
        self("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
