// Scales of a record of a panel in blocks (blocks.h).
#pragma once

#include "../blocks.h"
#include "coded_step.h"
#include "panel.h"

namespace winnow::WINNOW_ISA {

/// Scales of 32 inputs: for each feature of a panel, one behind the other.
class BlockScales {
 public:
  /// panel: where it begins.
  BlockScales(const BlockForm &form, const char *panel, int64_t b)
      : form_(form),
        head_(const_cast<char *>(panel) + PANEL * form.super_at(b)),
        tail_(const_cast<char *>(panel) + PANEL * (form.record_at(b) + (form.low_bits + form.high_bits) * BLOCK / 8)) {}

  f16 *half(int h) const { return reinterpret_cast<f16 *>(tail_) + h * PANEL; }
  f16 *half_minimum(int h) const { return half(form_.scales() + h); }
  float *whole() const { return reinterpret_cast<float *>(tail_); }
  f16 *super() const { return reinterpret_cast<f16 *>(head_); }
  f16 *super_minimum() const { return super() + PANEL; }
  int8_t *steps(int h) const { return reinterpret_cast<int8_t *>(tail_) + h * PANEL; }
  int8_t *minimum_steps(int h) const { return steps(form_.scales() + h); }

  /// Scales and minima of all features of a panel as numbers, of the h-th half.
  void read(BlockKind kind, int h, float *scale, float *minimum) const {
    for (int j = 0; j < PANEL; j += WIDTH) {
      if (kind == BlockKind::mxfp4) {
        store(scale + j, load(reinterpret_cast<const bf16 *>(half(h)) + j));
      } else if (form_.floats) {
        store(scale + j, load(whole() + j));
      } else if (form_.super) {
        store(scale + j, load(super() + j) * to_floats(widen_signed(steps(h) + j)));
        if (form_.minimum) store(minimum + j, -(load(super_minimum() + j) * to_floats(widen_signed(minimum_steps(h) + j))));
      } else {
        store(scale + j, load(half(h) + j));
        if (form_.minimum) store(minimum + j, load(half_minimum(h) + j));
      }
    }
  }

  /// Of one feature, as block_codes.cpp has them.
  void read_feature(BlockKind kind, int j, float &scale, float &least, int *step, int *least_step) const {
    step[0] = step[1] = least_step[0] = least_step[1] = 1;
    if (!form_.super) {
      scale = form_.floats ? whole()[j] : kind == BlockKind::mxfp4 ? to_float(bf16{half(0)[j].bits}) : to_float(half(0)[j]);
      least = form_.minimum ? -to_float(half_minimum(0)[j]) : 0.0f;
      return;
    }
    scale = to_float(super()[j]), least = form_.minimum ? to_float(super_minimum()[j]) : 0.0f;
    for (int h = 0; h < form_.scales(); ++h) {
      step[h] = steps(h)[j];
      if (form_.minimum) least_step[h] = minimum_steps(h)[j];
    }
  }

 private:
  const BlockForm &form_;
  char *head_, *tail_;
};

}  // namespace winnow::WINNOW_ISA
