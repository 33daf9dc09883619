// Of all recorded rows, those that belong to the present course of the run.

// Rows of the present course, oldest first: what was done between a checkpoint and a failure, and done again after
// the restart, is left out. rows: newest first; at: takes a row's iteration.
export function present(rows, at) {
  const kept = [];
  let limit = Infinity;
  for (const row of rows) {
    if (at(row) >= limit) continue;
    limit = at(row);
    kept.push(row);
  }
  return kept.reverse();
}

export function committed(checkpoints) {
  return (checkpoints?.checkpoints ?? []).filter((one) => one.status === "committed");
}

// Failures of which it is known where; a reported one may have stopped no step.
export function placed(failures) {
  return (failures?.failures ?? []).filter((one) => one.iteration !== null);
}

// Changes of the number of ranks, oldest first.
export function resized(plan) {
  const sizes = plan?.sizes ?? [];
  return sizes.slice(1).map((one, place) => ({ ...one, before: sizes[place].ranks }));
}
