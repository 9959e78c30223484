// The settings of generation, which are fields of a form.

export function readSettings() {
  const inputs = document.querySelectorAll("fieldset input");
  const values = Object.fromEntries(Array.from(inputs, input => [input.name, input.valueAsNumber]));
  return {...values, top_k: values.top_k || null};  // NaN: an empty field
}

// Show the value beside each slider.
export function showRanges() {
  for (const input of document.querySelectorAll("fieldset input[type=range]")) {
    const update = () => { input.parentElement.querySelector("output").value = input.value; };
    input.addEventListener("input", update);
    update();
  }
}
