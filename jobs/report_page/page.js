"use strict";
(() => {
  const ROWS_A_PAGE = 50;
  const { answers, thumbnails } = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const body = document.querySelector("#answers tbody");
  const words = answers.map((row) =>
    [row.video_id, row.question_id, row.question, ...row.options, row.answer, row.expected, row.error].filter(Boolean).join("\n").toLowerCase());
  const VERDICTS = { right: "right", wrong: "wrong", open: "", error: "no answer" };
  let found = [];
  let page = 0;

  // Texts come from anywhere: they are only ever set as text, never parsed as markup.
  function element(name, text, className) {
    const node = document.createElement(name);
    if (text !== undefined && text !== null) node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  function videoCell(row) {
    const cell = element("td");
    const button = element("button", row.video_id, "video");
    button.type = "button";
    button.title = "show this video's answers";
    button.addEventListener("click", () => { byId("search").value = row.video_id; filter(); });
    cell.append(button);
    if (Object.hasOwn(thumbnails, row.video_id)) {
      const image = element("img");
      image.src = thumbnails[row.video_id];
      image.alt = "";
      cell.append(image);
    }
    return cell;
  }

  function questionCell(row) {
    const cell = element("td");
    cell.append(element("div", row.question, "said"));
    if (row.options.length) {
      const list = element("ul");
      row.options.forEach((option, index) => {
        const letter = String.fromCharCode(65 + index);
        const share = row.choice_probabilities[index];
        const text = `${letter}. ${option}` + (share === undefined ? "" : `  ${(100 * share).toFixed(0)}%`);
        list.append(element("li", text, letter === row.choice ? "chosen" : ""));
      });
      cell.append(list);
    }
    return cell;
  }

  function answerCell(row) {
    const cell = element("td");
    cell.append(element("div", row.error === null ? row.answer : row.error, row.error === null ? "said" : "said error"));
    if (row.cut) cell.append(element("span", "cut off", "quiet"));
    return cell;
  }

  function show() {
    const pages = Math.max(1, Math.ceil(found.length / ROWS_A_PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    body.replaceChildren(...found.slice(page * ROWS_A_PAGE, (page + 1) * ROWS_A_PAGE).map((index) => {
      const row = answers[index];
      const line = element("tr");
      line.append(videoCell(row), questionCell(row), answerCell(row), element("td", row.expected),
        element("td", VERDICTS[row.verdict], row.verdict), element("td", row.error === null ? row.answer_s.toFixed(2) : "", "number"));
      return line;
    }));
    byId("count").textContent = `${found.length} of ${answers.length}`;
    byId("page").textContent = `${page + 1} / ${pages}`;
    byId("previous").disabled = page === 0;
    byId("next").disabled = page === pages - 1;
  }

  function filter() {
    const wanted = byId("search").value.trim().toLowerCase();
    const verdict = byId("verdict").value;
    found = [];
    answers.forEach((row, index) => {
      if (verdict && (verdict === "cut" ? !row.cut : row.verdict !== verdict)) return;
      if (!wanted || words[index].includes(wanted)) found.push(index);
    });
    page = 0;
    show();
  }

  byId("search").addEventListener("input", filter);
  byId("verdict").addEventListener("change", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("previous").addEventListener("click", () => { page -= 1; show(); });
  byId("next").addEventListener("click", () => { page += 1; show(); });
  filter();
})();
