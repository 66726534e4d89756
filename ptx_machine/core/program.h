// A kernel as parse.py hands it over: registers are places in a warp's register file, an
// instruction has a handler and its operands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
using Mask = uint32_t;
constexpr Mask kAll = 0xffffffffu;

struct Warp;
struct Instr;
using Run = void (*)(Warp&, const Instr&, Mask);

// A register: `size` bytes for each lane from `slot` on. Size 1 is a predicate, one Mask; size 0 a
// constant, which lies there in every size.
struct Operand {
  uint32_t slot = 0;
  int size = 0;
};

enum class Space : uint8_t { generic, global, shared, cluster, param };

// What the scheduler does with an instruction besides calling its handler.
enum class Kind : uint8_t {
  plain,
  branch,
  end,
  barrier,       // of the block
  cluster_wait,  // arriving is plain
  look,          // for what other threads do: a load that may find the same again and again
  collective,    // all lanes of a mask, which is the last operand, run it together
  whole_warp     // all lanes run it together
};

struct Number;

struct Instr {
  Run run = nullptr, inner = nullptr;  // `inner` is what a rounding mode is wrapped around
  Kind kind = Kind::plain;
  int guard = -1;  // the slot of the predicate
  bool negated = false;
  int64_t offset = 0;         // of an address, or the target of a branch
  int64_t second_offset = 0;  // of a second address
  std::vector<Operand> o;
  bool splits = false;      // a mov into several registers
  bool is_product = false;  // of a warpgroup
  std::string opcode;
  uint32_t pc = 0;
  // Loads and stores.
  Space space = Space::generic;
  int width = 0, count = 1;  // bytes of an element, elements
  bool is_signed = false, constant = false;
  bool strong = false, acquires = false, releases = false;  // in PTX's model of memory
  Number (*from)(uint64_t) = nullptr;                       // how a conversion reads its source
  int mode = 0;                                             // what else a handler has to know
};

// An opcode in parts, which are taken out one by one: what is left over is not understood.
struct Form {
  std::vector<std::string> parts;
  const std::string whole;

  explicit Form(const std::string& opcode) : whole(opcode) {
    std::string part;
    for (size_t i = 0; i < opcode.size(); ++i) {
      const bool colons = opcode.compare(i, 2, "::") == 0;
      if (colons || opcode[i] != '.') {
        part += opcode[i];
        if (colons) part += opcode[++i];
      } else {
        parts.push_back(part);
        part.clear();
      }
    }
    parts.push_back(part);
    parts.erase(parts.begin());
  }
  bool take(const std::string& part) {
    for (auto at = parts.begin(); at != parts.end(); ++at)
      if (*at == part) {
        parts.erase(at);
        return true;
      }
    return false;
  }
  // The first of `known` that is there; -1 if none is.
  int one_of(const std::vector<std::string>& known) {
    for (size_t i = 0; i < known.size(); ++i)
      if (take(known[i])) return int(i);
    return -1;
  }
  std::string last() {
    if (parts.empty()) unknown();
    const std::string part = parts.back();
    parts.pop_back();
    return part;
  }
  [[noreturn]] void unknown() const {
    throw std::runtime_error("unknown opcode or modifier: " + whole);
  }
};

using Resolve = void (*)(Form&, Instr&);

inline std::map<std::string, Resolve>& opcodes() {
  static std::map<std::string, Resolve> all;
  return all;
}

struct Constant {
  uint32_t slot;
  uint64_t value;
};
struct Special {
  uint32_t slot;
  std::string name;
};

// Where a constant lies for elements of 2, 4 and 8 bytes and as a predicate, from its slot on.
constexpr uint32_t kConstant4 = 64, kConstant8 = 192, kConstantMask = 448, kConstantBytes = 512;

struct Program {
  std::vector<Instr> code;
  std::vector<Constant> constants;
  std::vector<Special> specials;
  uint64_t bytes = 0;         // of a warp's registers
  int granule = 4;            // bytes of the narrowest store, up to 4
  bool has_products = false;  // of warpgroups

  void add(std::istringstream& line) {
    Instr instr;
    size_t operands = 0;
    line >> instr.guard >> instr.negated >> instr.opcode >> instr.offset;
    line >> instr.second_offset >> instr.splits >> operands;
    instr.o.resize(operands);
    for (Operand& o : instr.o) line >> o.slot >> o.size;
    instr.pc = uint32_t(code.size());
    Form form(instr.opcode);
    const auto known = opcodes().find(instr.opcode.substr(0, instr.opcode.find('.')));
    if (known == opcodes().end()) form.unknown();
    known->second(form, instr);
    if (!form.parts.empty() || instr.run == nullptr) form.unknown();
    has_products = has_products || instr.is_product;
    if (instr.opcode.rfind("st", 0) == 0 && instr.width > 0 && instr.width < granule)
      granule = instr.width;
    code.push_back(instr);
  }

  explicit Program(const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string what;
      words >> what;
      if (what == "bytes") words >> bytes;
      if (what == "constant") {
        constants.emplace_back();
        words >> constants.back().slot >> constants.back().value;
      }
      if (what == "special") {
        specials.emplace_back();
        words >> specials.back().slot >> specials.back().name;
      }
      if (what == "run") add(words);
    }
  }
};

}  // namespace ptx
