// What belongs to the run as it is now, of rows that tell everything that ever happened.

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

// Whether training went on from a predicted state.
export function isPredicted(recovery) {
  return !["scratch", "exact"].includes(recovery.method) && !["vetoed", "rolled_back"].includes(recovery.outcome);
}
