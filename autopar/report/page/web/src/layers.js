// An action of the timeline, cut into its layers: each waits for its collectives, then computes.

/** [stage, letter, microbatch] of `2F0`, or of its collectives; null of anything else. */
export const partOf = (action) => action.match(/^(?:collectives of )?(\d+)([FBIW])(\d+)$/)?.slice(1) ?? null;

/** The layers of a part as [{ name, compute, waits, besides }], the lists by phase: [phase, seconds]. */
export function works(timeline, [stage, letter]) {
  return timeline.stages[stage][letter].map(([layer, compute, ...phases]) => ({
    name: timeline.layers[layer], compute,
    waits: phases.filter(([, waited]) => waited).map(([phase, waited]) => [phase, waited]),
    besides: phases.filter(([, , beside]) => beside).map(([phase, , beside]) => [phase, beside]),
  }));
}

/** Runs of layers that each take `least` seconds or more, so that they can be seen. */
export function grouped(layers, least) {
  const groups = [];
  let size = Infinity;
  for (const layer of layers) {
    const own = layer.compute + seconds(layer.waits);
    if (size >= least) { groups.push({ ...layer, last: layer.name }); size = own; continue; }
    const group = groups.at(-1);
    groups[groups.length - 1] = { ...group, last: layer.name, compute: group.compute + layer.compute,
      waits: added(group.waits, layer.waits), besides: added(group.besides, layer.besides) };
    size += own;
  }
  return groups;
}

/** Layers in time: { ..., start, took }; `start` is when compute begins, after what it waits for. */
export function placed(timeline, part, layers, start, end) {
  const sum = (of) => layers.reduce((total, layer) => total + of(layer), 0);
  const compute = sum((l) => l.compute), waited = sum((l) => seconds(l.waits)), beside = sum((l) => seconds(l.besides));
  const exposed = beside - Math.min(beside, compute * (1 + timeline.stages[part[0]].slowdown));
  const stretch = compute ? Math.max(end - start - waited - exposed, 0) / compute : 0;
  let now = start;
  return layers.map((layer) => {
    const begun = now + seconds(layer.waits), took = layer.compute * stretch;
    now = begun + took;
    return { ...layer, start: begun, took };
  });
}

/** When a share of the compute of a part is done. */
export function clock(timeline, part, start, end) {
  const layers = placed(timeline, part, works(timeline, part), start, end), total = layers.reduce((sum, l) => sum + l.took, 0);
  let k = 0, before = 0;
  return (share) => { // asked in order
    while (k < layers.length - 1 && before + layers[k].took <= share * total) { before += layers[k].took; k += 1; }
    return layers.length ? layers[k].start + Math.max(share * total - before, 0) : start + share * (end - start);
  };
}

export const seconds = (phases) => phases.reduce((total, [, time]) => total + time, 0);

function added(a, b) {
  const sums = new Map(a);
  for (const [phase, time] of b) sums.set(phase, (sums.get(phase) ?? 0) + time);
  return [...sums];
}
