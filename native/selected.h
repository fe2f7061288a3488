// A layer's attention where the values lie in slower memory: decoding tokens read few of them.
#pragma once

#include "dispatch.h"

namespace winnow {

/// As Kernels::attend. Tokens that select values read those of their largest weights alone; observers see all
/// weights either way.
ValuesRead attend_selected(const Kernels &, const Attend &, const Selection &, Workspace &);

}  // namespace winnow
