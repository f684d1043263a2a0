#include "types.h"

namespace edge {
const Isa* isa_dotprod() { return nullptr; }
bool dotprod_available() { return false; }
}  // namespace edge
