"use strict";
(() => {
  const form = document.getElementById("filters"), table = document.getElementById("matrix");
  const said = document.getElementById("shown"), head = [...table.tHead.rows[0].cells];
  const bodies = [...table.tBodies], day = 86400000;
  const apply = () => {
    const wanted = Object.fromEntries(new FormData(form));
    const column = head.findIndex((cell) => cell.dataset.g === wanted.gpu);
    const since = wanted.age ? Math.floor(Date.now() / day) - wanted.age : 0;
    let all = 0, shown = 0;
    for (const body of bodies) {
      let some = 0;
      for (const row of body.rows) {
        if (row.className) continue;
        const cells = [...row.cells].slice(1);
        const asked = column > 0 ? [cells[column - 1]] : cells;
        const fits = (!wanted.framework || body.dataset.f === wanted.framework)
          && (!wanted.cuda || row.dataset.c === wanted.cuda)
          && (!wanted.age || (row.dataset.t || 0) >= since)
          && (!wanted.outcome || asked.some((cell) => cell.className === wanted.outcome));
        row.hidden = !fits;
        some += fits;
        all += 1;
        cells.forEach((cell, i) => { cell.hidden = column > 0 && i !== column - 1; });
      }
      body.hidden = !some;
      shown += some;
    }
    head.forEach((cell, i) => { cell.hidden = column > 0 && i > 0 && i !== column; });
    said.textContent = `${shown} of ${all} images`;
    const kept = new URLSearchParams(Object.entries(wanted).filter(([, value]) => value)).toString();
    history.replaceState(null, "", kept ? `#${kept}` : location.pathname);
  };
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.hidden = false;
  apply();
})();
