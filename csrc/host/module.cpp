// Python module hstree._host: numpy in and out, without the GIL while C++ runs. hstree/trees checks dtypes,
// shapes and ranges before it calls; only `validate` and `from_parents` check the tree they are given.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "recipes.h"
#include "tree.h"

namespace py = pybind11;

namespace {

using namespace hstree::host;

template <typename T>
using In = py::array_t<T, py::array::c_style>;

// An array that is written, or None. Never converted, which would be a copy.
template <typename T>
using Out = std::optional<py::array_t<T, py::array::c_style>>;

template <typename T>
py::array_t<T> to_numpy(Array<T>&& array, std::vector<py::ssize_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<py::ssize_t>(array.size())};
  T* data = array.release();
  const py::capsule owner(data, [](void* p) { delete[] static_cast<T*>(p); });
  return py::array_t<T>(shape, data, owner);
}

py::tuple to_numpy(TreeArrays&& tree) {
  return py::make_tuple(to_numpy(std::move(tree.order)), to_numpy(std::move(tree.node_offset)),
                        to_numpy(std::move(tree.boundary)));
}

TreeView view(const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary) {
  return {order.size(), node_offset.size() - 1, order.data(), node_offset.data(), boundary.data()};
}

template <typename F>
auto without_gil(const F& work) {
  const py::gil_scoped_release release;
  return work();
}

template <typename T>
T* memory(Out<T>& array) {
  return array ? array->mutable_data() : nullptr;
}

const double* data_or_null(const std::optional<In<double>>& array) {
  return array ? array->data() : nullptr;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Trees on the host. Internal: use hstree.trees.";
  m.attr("MAX_DEPTH") = py::int_(static_cast<int>(hstree::max_depth));
  m.attr("MAX_CLASSES") = py::int_(max_classes);

  m.def("validate",
        [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary) {
          without_gil([&] {
            validate(order.data(), order.size(), node_offset.data(), node_offset.size(), boundary.data(),
                     boundary.size());
          });
        });
  m.def("class_depth",
        [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary) {
          const TreeView tree = view(order, node_offset, boundary);
          return to_numpy(without_gil([&] { return class_depth(tree); }));
        });
  m.def("edges", [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary) {
    const TreeView tree = view(order, node_offset, boundary);
    Edges e = without_gil([&] { return edges(tree); });
    return py::make_tuple(to_numpy(std::move(e.node)), to_numpy(std::move(e.ordinal)),
                          to_numpy(std::move(e.child_node)), to_numpy(std::move(e.begin)),
                          to_numpy(std::move(e.end)), to_numpy(std::move(e.parent_edge)),
                          to_numpy(std::move(e.depth)));
  });
  m.def("table_sizes", [](const In<int32_t>& order, const In<int64_t>& node_offset,
                          const In<int32_t>& boundary, bool groups) {
    const TreeView tree = view(order, node_offset, boundary);
    const TableSizes s = without_gil([&] { return table_sizes(tree, groups); });
    return py::make_tuple(s.root_width, s.n_binary, s.n_path, s.max_depth, s.max_group);
  });
  const auto given = [](const char* name) { return py::arg(name).none(true).noconvert() = py::none(); };
  m.def(
      "write_tables",
      [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary, bool groups,
         int64_t path_begin, Out<int32_t> leaf_position, Out<int32_t> root_child, Out<int64_t> path_offset,
         Out<int32_t> path, Out<int32_t> node, Out<int32_t> edge, Out<int32_t> leaf_edge) {
        TableMemory out;
        out.leaf_position = memory(leaf_position);
        out.root_child = memory(root_child);
        out.path_offset = memory(path_offset);
        out.path = memory(path);
        out.path_begin = path_begin;
        out.node = memory(node);
        out.edge = memory(edge);
        out.leaf_edge = memory(leaf_edge);
        const TreeView tree = view(order, node_offset, boundary);
        without_gil([&] { write_tables(tree, groups, out); });
      },
      py::arg("order"), py::arg("node_offset"), py::arg("boundary"), py::arg("groups"), py::kw_only(),
      py::arg("path_begin") = 0, given("leaf_position"), given("root_child"), given("path_offset"),
      given("path"), given("node"), given("edge"), given("leaf_edge"));
  m.def("edge_masses", [](const In<int32_t>& order, const In<int64_t>& node_offset,
                          const In<int32_t>& boundary, const In<double>& frequencies) {
    const TreeView tree = view(order, node_offset, boundary);
    return to_numpy(without_gil([&] { return edge_masses(tree, frequencies.data()); }));
  });
  m.def("collapse", [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary,
                       int64_t clusters, bool binary, int64_t max_group,
                       const std::optional<In<double>>& frequencies) {
    const TreeView tree = view(order, node_offset, boundary);
    return to_numpy(
        without_gil([&] { return collapse(tree, clusters, binary, max_group, data_or_null(frequencies)); }));
  });
  m.def("to_parents",
        [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary) {
          const TreeView tree = view(order, node_offset, boundary);
          auto parents = without_gil([&] { return to_parents(tree); });
          return py::make_tuple(to_numpy(std::move(parents.first)), to_numpy(std::move(parents.second)));
        });
  m.def("from_parents", [](const In<int64_t>& parent, const std::optional<In<int64_t>>& leaf_class) {
    const int64_t* classes = leaf_class ? leaf_class->data() : nullptr;
    return to_numpy(without_gil([&] { return from_parents(parent.data(), classes, parent.size()); }));
  });
  m.def("random_tree", [](int64_t n_classes, uint64_t seed) {
    return to_numpy(without_gil([&] { return random_tree(n_classes, seed); }));
  });
  m.def("huffman_tree", [](const In<double>& frequencies, uint64_t seed) {
    return to_numpy(without_gil([&] { return huffman_tree(frequencies.data(), frequencies.size(), seed); }));
  });
  m.def("cluster_tree", [](const In<float>& vectors, const std::optional<In<double>>& frequencies,
                           uint64_t seed, double noise, int64_t iterations, int64_t depth_limit) {
    const ClusterOptions options = {noise, iterations, depth_limit};
    return to_numpy(without_gil([&] {
      return cluster_tree(vectors.data(), vectors.shape(0), vectors.shape(1), data_or_null(frequencies), seed,
                          options);
    }));
  });
}
