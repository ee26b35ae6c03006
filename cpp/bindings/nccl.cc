// The part of zcomm._native that speaks NCCL: argument conversion, GIL release, nothing else.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "nccl_library.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using zcomm::nccl::Library;

}  // namespace

void DefineNccl(nb::module_& m) {
  nb::class_<Library>(m, "NcclLibrary")
      .def_ro("path", &Library::path)
      .def_prop_ro("version", [](const Library& self) { return zcomm::nccl::VersionText(self.version); })
      .def_prop_ro("can_register", &Library::can_register);
  m.def("load_nccl", &zcomm::nccl::LoadLibrary, nb::call_guard<nb::gil_scoped_release>(), "path"_a, "candidates"_a);
}
