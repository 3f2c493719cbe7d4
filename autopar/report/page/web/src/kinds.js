// What has which colour. Colours are those of Okabe and Ito, told apart by colour-blind readers;
// hidden communication is hatched besides, and every use of a colour has its word beside it.

export const TIME = {
  matmul: "#0072b2", attention: "#56b4e9", pointwise: "#009e73", conversion: "#8a8a8a",
  slowdown: "#b58900", collective: "#d55e00", "other collective": "#cc79a7", wait: "#a14a76",
  idle: "#c9c9c9", optimizer: "#e69f00",
};

export const MEMORY = {
  weights: "#0072b2", gradients: "#56b4e9", optimizer: "#e69f00", activations: "#009e73",
  "gathered weights": "#cc79a7", buffers: "#8a8a8a",
};

// How a result is placed on an axis (autopar/report/picture/kinds.py).
export const PLACED = {
  data: "sharded along the batch",
  tensor: "sharded along a parameter's factor",
  sequence: "sharded along another dim",
  replicated: "the same on every rank (R, I)",
  partial: "to be summed over ranks (P)",
};
