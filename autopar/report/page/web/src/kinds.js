// What has which colour: one meaning each, on every part of the page. Every use of a colour has its
// word beside it; hidden communication is hatched besides.

export const TIME = {
  matmul: "#0072b2", attention: "#56b4e9", pointwise: "#5ab4ac", conversion: "#8a8a8a",
  slowdown: "#b58900", collective: "#d55e00", "other collective": "#f4a582", wait: "#a14a76",
  idle: "#c9c9c9", optimizer: "#e69f00",
};

export const MEMORY = {
  weights: "#4c3f9f", gradients: "#009e73", optimizer: TIME.optimizer, activations: "#b3de69",
  "gathered weights": "#cc79a7", buffers: "#8a6d5a",
};

export const MEMORY_WORDS = {
  weights: "stored parameters", gradients: "of parameters", optimizer: "moments and copies between steps",
  activations: "kept for backward, and their gradients", "gathered weights": "parameters whole for use",
  buffers: "temporaries of operators, buffers of collectives, the batch, messages",
};

// Communication has the colour of what it moves.
export const PHASES = {
  param_gather: "gathers of parameters", grad_sync: "gradient sync", forward: "collectives of activations", backward: "collectives of activations",
};

export const EVENTS = {
  forward: "#a6bddb", backward: "#8674c4", "gradients of weights": "#b9aee0", "once a step": "#6b6b6b", "gathers of parameters": MEMORY["gathered weights"], "gradient sync": MEMORY.gradients,
  "collectives of activations": MEMORY.activations, collectives: TIME.collective, messages: TIME.wait,
};

// How a result is placed on an axis (autopar/report/picture/kinds.py).
export const PLACED = {
  data: "sharded along the batch",
  tensor: "sharded along a parameter's factor",
  sequence: "sharded along another dim",
  replicated: "the same on every rank (R, I)",
  partial: "to be summed over ranks (P)",
};
