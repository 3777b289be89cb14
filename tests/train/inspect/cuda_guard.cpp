// Registers a guard that does nothing for CUDA devices, so that autograd accepts fake tensors on them without a GPU.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
