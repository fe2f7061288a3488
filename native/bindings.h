// What the files of bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

namespace winnow {

/// Memory of a tensor, a number in Python: becomes a pointer of any type.
struct Address {
  uintptr_t value;

  template <class T>
  operator T *() const {
    return reinterpret_cast<T *>(value);
  }
};

/// A constructor: the fields of T in their order.
template <class T, class... Given>
void make(T *self, Given... given) {
  new (self) T{std::move(given)...};
}

/// Adds the types that kernels take, which `Kernels` names.
void bind_types(nanobind::module_ &m);

}  // namespace winnow

template <>
struct nanobind::detail::type_caster<winnow::Address> {
  NB_TYPE_CASTER(winnow::Address, const_name("int"))

  bool from_python(handle from, uint8_t flags, cleanup_list *cleanup) noexcept {
    make_caster<uintptr_t> number;
    if (!number.from_python(from, flags, cleanup)) return false;
    value = {number.value};
    return true;
  }

  static handle from_cpp(winnow::Address address, rv_policy policy, cleanup_list *cleanup) noexcept {
    return make_caster<uintptr_t>::from_cpp(address.value, policy, cleanup);
  }
};
