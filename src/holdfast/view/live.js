"use strict";
// Only in a page that is served while its run goes on: it asks for what is new, and puts that where the reader is.
(() => {
  const POLL_MS = 2000, PATIENCE_MS = 30000;
  const line = document.getElementById("live");
  const blocks = (page) => [page.querySelector("header"), ...page.querySelector("main").children];
  const keyOf = (block) => block.id || block.tagName;
  const sources = new Map(blocks(document).map((one) => [keyOf(one), one.outerHTML]));
  let tag = line.dataset.tag, made = line.dataset.made, waiting = null, answered = new Date(), held = false;

  const time = (date) => date.toISOString().slice(0, 19).replace("T", " ");
  function say(text, stale) {
    if (line.textContent !== text) line.textContent = text;
    line.classList.toggle("stale", stale);
  }

  // Somebody who drags in a chart or has selected text keeps what is under the pointer.
  addEventListener("pointerdown", () => { held = true; }, true);
  for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => { held = false; }, true);
  const isHeld = () => held || !getSelection().isCollapsed || document.activeElement?.matches(".search");

  // What the reader has opened, scrolled and drawn goes over into a block that takes the place of another.
  function handOver(old, fresh) {
    for (const place of fresh.querySelectorAll(".chart")) {
      const drawn = old.querySelector(`.chart[data-figure="${CSS.escape(place.dataset.figure)}"]`);
      if (drawn === null) continue;
      drawn.setAttribute("aria-label", place.getAttribute("aria-label"));
      place.replaceWith(drawn);
    }
    const searched = [...old.querySelectorAll(".search")].map((one) => one.value);
    const sorted = [...old.querySelectorAll(".answers")].map((one) => {
      const head = one.querySelector("[aria-sort]");
      return head === null ? null : { place: head.cellIndex, clicks: head.getAttribute("aria-sort") === "ascending" ? 1 : 2 };
    });
    const opened = [...old.querySelectorAll("details")].map((one) => one.open);
    fresh.querySelectorAll("details").forEach((one, number) => { one.open = opened[number] ?? false; });
    const shifted = [...old.querySelectorAll(".scroll, pre")].map((one) => one.scrollLeft);
    old.replaceWith(fresh);
    fresh.querySelectorAll(".scroll, pre").forEach((one, number) => { one.scrollLeft = shifted[number] ?? 0; });
    fresh.querySelectorAll(".search").forEach((one, number) => {
      one.value = searched[number] ?? "";
      one.dispatchEvent(new Event("input", { bubbles: true }));
    });
    fresh.querySelectorAll(".answers").forEach((one, number) => {
      for (let click = 0; click < (sorted[number]?.clicks ?? 0); click++) one.tHead.rows[0].cells[sorted[number].place].click();
    });
  }

  // By what can be found again in the page to come: the words of headings, of charts and of rows.
  function marks() {
    const seen = new Map();
    const found = [...document.querySelectorAll("h2, h3, h4, figcaption, summary, tr")].map((one) => {
      const words = one.textContent, number = (seen.get(words) ?? 0) + 1;
      seen.set(words, number);
      return { key: `${number} ${words}`, box: one.getBoundingClientRect() };
    });
    return found.filter(({ box }) => box.height > 0);
  }

  function take(page) {
    const below = marks().filter(({ box }) => box.top >= 0);
    const main = document.querySelector("main");
    const fresh = new Map(blocks(page).map((one) => [keyOf(one), one]));
    for (const old of blocks(document)) if (!fresh.has(keyOf(old))) old.remove();
    const there = new Map(blocks(document).map((one) => [keyOf(one), one]));
    let last = null;
    for (const [name, block] of fresh) {
      const source = block.outerHTML, old = there.get(name);
      if (old === undefined) {
        if (last === null) main.prepend(block);
        else last.after(block);
      } else if (sources.get(name) !== source) {
        handOver(old, block);
      }
      sources.set(name, source);
      last = name === "HEADER" ? null : document.getElementById(name);
    }
    drawAnew(JSON.parse(page.getElementById("figures").textContent));
    const now = new Map(marks().map(({ key, box }) => [key, box.top]));
    const kept = below.find(({ key }) => now.has(key));
    if (kept !== undefined && scrollY > 0) scrollBy({ top: now.get(kept.key) - kept.box.top, behavior: "instant" });
    ({ tag, made } = page.getElementById("live").dataset);
  }

  async function ask(path) {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(answer.status);
    return answer;
  }

  async function poll() {
    let state;
    try {
      state = await (await ask("state")).json();
      const newest = waiting === null ? tag : waiting.getElementById("live").dataset.tag;
      if (state.run === line.dataset.run && state.tag !== null && state.tag !== newest) {
        waiting = new DOMParser().parseFromString(await (await ask("update")).text(), "text/html");
      }
    } catch {
      say(`as of ${made} UTC; nobody answers since ${time(answered)}: the run has ended, or its launcher was killed. ` +
        `"${line.dataset.command}" makes the file. Given the same port again, the run goes on here.`, true);
      return;
    }
    answered = new Date();
    if (state.run !== line.dataset.run) {
      say(`as of ${made} UTC; another run is served here now: reload the page to see it`, true);
      return;
    }
    if (waiting !== null && !isHeld()) {
      take(waiting);
      waiting = null;
    }
    if (state.trouble !== null) say(`live: as of ${made} UTC; a newer page could not be made: ${state.trouble}`, true);
    else say(`live: as of ${made} UTC${waiting === null ? "" : "; newer is there, and shown when nothing is selected"}`, false);
  }

  async function follow() {
    try {
      if (!document.hidden) await poll();
    } finally {
      setTimeout(follow, POLL_MS);
    }
  }
  setTimeout(follow, POLL_MS);
})();
