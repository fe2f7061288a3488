#include "selected.h"

namespace winnow {

namespace {

/// KVs that a sequence has in a layer.
int64_t num_kvs(const Cache &cache, int64_t slot, int64_t layer) {
  int64_t count = 0;
  for (int64_t head = 0; head < cache.num_heads; ++head) count += Row(cache, slot, layer, head).length;
  return count;
}

}  // namespace

ValuesRead attend_selected(const Kernels &kernels, const Attend &call, const Selection &selection, Workspace &work) {
  const Batch &batch = call.batch;
  std::vector<bool> reads_all(batch.num_tokens());
  int64_t in_full = 0, observed = 0;
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    const int64_t end = batch.starts[seq] + batch.counts[seq];
    bool any = false;
    observed += batch.observer[seq] >= 0;
    for (int64_t token = batch.starts[seq]; token < end; ++token) {
      reads_all[token] = !selection.selects(batch, seq, token) && !(call.read && !(*call.read)[token]);
      any |= reads_all[token];
    }
    if (any) in_full += num_kvs(call.cache, batch.slots[seq], call.layer);
  }
  // First: it writes outputs of tokens whose weights are observed, too.
  if (in_full || observed) {
    Attend rest = call;
    rest.read = &reads_all;
    kernels.attend(rest, work);
  }
  ValuesRead read = kernels.attend_selected(call, selection, work);
  read.in_full = in_full;
  return read;
}

}  // namespace winnow
