// The rest of the layers of decode_pass.cu, behind an item of its attention.
  }
}
  barrier.arrive();
  if (!barrier.wait<GIVES_UP>()) return give_up();
  product((const N*)attended, layer.out, QUERIES_WIDTH, HIDDEN, OUT_SPLITS);
  barrier.arrive();
  prefetch_tile(layer.gate_up, HIDDEN, 2 * WIDTH, 1, true, PREFETCHED, 2 * PREFETCHED);
  if (!barrier.wait<GIVES_UP>()) return give_up();
  add_norms(OUT_SPLITS, layer.feed_norm, (N*)normed);
  barrier.arrive();
  if (!barrier.wait<GIVES_UP>()) return give_up();
  gated_product((const N*)normed, layer.gate_up);
  barrier.arrive();
  prefetch_tile(layer.down, WIDTH, HIDDEN, DOWN_SPLITS, false, 0, PREFETCHED);
  if (!barrier.wait<GIVES_UP>()) return give_up();
  product((const N*)gates, layer.down, WIDTH, HIDDEN, DOWN_SPLITS);
  barrier.arrive();
  const bool goes_on = number + 1 < LAYERS;
  const Layer& next = layer_table[number + 1];
  if (goes_on) prefetch_tile(next.qkv, HIDDEN, QKV, QKV_SPLITS, false, 0, PREFETCHED);
  if (!barrier.wait<GIVES_UP>()) return give_up();
  add_norms(DOWN_SPLITS, next.norm, goes_on ? (N*)normed : (N*)hidden);
  if (goes_on) {
    barrier.arrive();
    if (!barrier.wait<GIVES_UP>()) return give_up();
  }
}
barrier.end();
