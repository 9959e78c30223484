// The states before and after the current one, for undo and redo.

export class Undo {
  #past = []; #future = [];

  get possible() { return this.#past.length > 0; }

  remember(state) {
    this.#past.push(state);
    this.#future = [];
  }

  // Return the state to restore in place of the current one, or null if there is none.
  undo(current) { return move(this.#past, this.#future, current); }

  redo(current) { return move(this.#future, this.#past, current); }
}

function move(from, to, current) {
  if (!from.length) return null;
  to.push(current);
  return from.pop();
}
