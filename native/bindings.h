// What the files of bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace winnow {

template <class T>
T *at(uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

/// Adds the types that kernels take, which `Kernels` names.
void bind_types(nanobind::module_ &m);

}  // namespace winnow
