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
  m.def("tables", [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary,
                     bool leaf_groups) {
    const TreeView tree = view(order, node_offset, boundary);
    Tables t = without_gil([&] { return tables(tree, leaf_groups); });
    const py::ssize_t n_wide = t.wide_path.size() / 3, n_group = t.group.size() / 3;
    py::object root_child = py::none();
    if (t.root_width > 0) root_child = to_numpy(std::move(t.root_child));
    return py::make_tuple(to_numpy(std::move(t.leaf_position)), to_numpy(std::move(t.path_offset)),
                          to_numpy(std::move(t.path)), to_numpy(std::move(t.wide_offset)),
                          to_numpy(std::move(t.wide_path), {n_wide, 3}), to_numpy(std::move(t.group_offset)),
                          to_numpy(std::move(t.group), {n_group, 3}), root_child, t.root_width, t.n_binary,
                          t.n_wide_rows, t.max_depth, t.max_width, t.max_group);
  });
  m.def("edge_masses", [](const In<int32_t>& order, const In<int64_t>& node_offset,
                          const In<int32_t>& boundary, const In<double>& frequencies) {
    const TreeView tree = view(order, node_offset, boundary);
    return to_numpy(without_gil([&] { return edge_masses(tree, frequencies.data()); }));
  });
  m.def("collapse",
        [](const In<int32_t>& order, const In<int64_t>& node_offset, const In<int32_t>& boundary,
           int64_t root, int64_t leaf, int64_t levels, const std::optional<In<double>>& frequencies) {
          const TreeView tree = view(order, node_offset, boundary);
          return to_numpy(
              without_gil([&] { return collapse(tree, root, leaf, levels, data_or_null(frequencies)); }));
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
