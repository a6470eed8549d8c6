// What the emulation knows of a kernel before its launch, read from the ELF file of the library that it is in.
//
// __global__ and __shared__ put tags into the mangled names of kernels and of shared variables. (Of kernels in a
// namespace: g++ leaves the tag out of templates that are in none.) The name of a static variable begins with that
// of its function: a kernel's static shared memory is the sum over the variables whose names begin with its own.
// Those of a device function would be missing, since its callers are not known here: a library with such a
// variable is refused.
#pragma once

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#define __global__ __attribute__((abi_tag("kernel")))
#define __shared__ static __attribute__((abi_tag("shared")))
#define __launch_bounds__(...)

namespace emu {

struct SharedVariable {
  unsigned char* address;
  size_t bytes;
};

struct KernelAttributes {
  std::string name;  // mangled
  std::vector<SharedVariable> shared;
  size_t static_bytes = 0;
};

// The kernels of the library at path, which lies at base in memory, by address.
inline std::map<uintptr_t, KernelAttributes> read_kernels(const std::string& path, uintptr_t base) {
  std::ifstream stream(path, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(stream), {}};
  const auto at = [&](size_t offset, auto* target) {
    if (offset + sizeof *target > file.size()) throw std::runtime_error(path + " is not a whole ELF file");
    std::memcpy(target, file.data() + offset, sizeof *target);
  };
  Elf64_Ehdr header;
  at(0, &header);
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  for (size_t i = 0; i < sections.size(); ++i) at(header.e_shoff + i * header.e_shentsize, &sections[i]);
  const auto text = [&](uint32_t strings, size_t offset) {
    return std::string_view(file.data() + sections.at(strings).sh_offset + offset);
  };

  // Functions without external linkage can have the same name in two source files; source: which one, or 0.
  struct Symbol {
    std::string_view name;
    int source;
    uintptr_t address;
    size_t bytes;
  };
  std::vector<Symbol> kernels, variables;
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB) continue;
    int source = 0;
    for (size_t offset = 0; offset < section.sh_size; offset += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      at(section.sh_offset + offset, &symbol);
      const auto type = ELF64_ST_TYPE(symbol.st_info);
      if (type == STT_FILE) ++source;
      if (symbol.st_shndx == SHN_UNDEF || (type != STT_FUNC && type != STT_OBJECT)) continue;
      const std::string_view name = text(section.sh_link, symbol.st_name);
      const bool is_local = ELF64_ST_BIND(symbol.st_info) == STB_LOCAL;
      const Symbol found = {name, is_local ? source : 0, base + symbol.st_value, symbol.st_size};
      const bool nested = name.compare(0, 3, "_ZZ") == 0, guard = name.compare(0, 4, "_ZGV") == 0;
      if (type == STT_FUNC && !nested && name.find("B6kernel") != name.npos &&
          name.find('.') == name.npos)  // not a part that the compiler split off
        kernels.push_back(found);
      if (type == STT_OBJECT && !guard && name.find("B6shared") != name.npos) variables.push_back(found);
    }
  }

  std::map<uintptr_t, KernelAttributes> result;
  for (const Symbol& kernel : kernels) result[kernel.address].name = kernel.name;
  for (const Symbol& variable : variables) {
    const std::string_view nested =
        variable.name.substr(std::min(variable.name.find_first_not_of('Z', 2), variable.name.size()));
    bool owned = false;
    for (const Symbol& kernel : kernels) {
      const std::string own = std::string(kernel.name.substr(2)) + 'E';
      if (nested.compare(0, own.size(), own) != 0) continue;
      if (kernel.source != 0 && kernel.source != variable.source) continue;
      KernelAttributes& attributes = result[kernel.address];
      attributes.shared.push_back({reinterpret_cast<unsigned char*>(variable.address), variable.bytes});
      attributes.static_bytes += variable.bytes;
      owned = true;
    }
    if (!owned)
      throw std::runtime_error(
          "emulation: a __shared__ variable outside a kernel (let the kernel declare and pass it): " +
          std::string(variable.name));
  }
  return result;
}

inline const KernelAttributes& kernel_attributes(const void* kernel) {
  static std::map<uintptr_t, KernelAttributes> known;
  const auto address = reinterpret_cast<uintptr_t>(kernel);
  auto found = known.find(address);
  if (found == known.end()) {
    Dl_info info;
    if (dladdr(kernel, &info) == 0) throw std::runtime_error("emulation: a kernel in no library");
    known.merge(read_kernels(info.dli_fname, reinterpret_cast<uintptr_t>(info.dli_fbase)));
    found = known.find(address);
    if (found == known.end())
      throw std::runtime_error(std::string("emulation: no kernel of a namespace at this address of ") +
                               info.dli_fname);
  }
  return found->second;
}

}  // namespace emu
