// Which step the timeline shows, in words and tables: as page/sections/step.py does for the first one.
{
  const { duration, short, element } = torchlens;
  const MOST_COLLECTIVES = 24;
  const FIRST_COLLECTIVES = 8;
  const MOST_OPTIONS = 80;

  // In its waits on the training thread.
  function blockedUs({ rows }) {
    let sum = 0;
    for (const { lane, kind, duration_us } of rows) {
      if (lane === "host") kind.forEach((each, at) => (sum += each === "wait" ? duration_us[at] : 0));
    }
    return sum;
  }

  // Who was waited for, and how long.
  torchlens.stepFinding = ({ step, ranks, collectives }) => {
    const us = (value) => duration(value / 1e6);
    const blocked = new Map();
    for (const { last_rank, asynchronous, wait_us } of collectives) {
      if (last_rank === null || asynchronous) continue;
      if (!blocked.has(last_rank)) blocked.set(last_rank, new Map());
      const waits = blocked.get(last_rank);
      for (const [rank, wait] of Object.entries(wait_us)) waits.set(rank, (waits.get(rank) ?? 0) + (wait ?? 0));
    }
    const longest = ranks.reduce((one, other) => (other.duration_us > one.duration_us ? other : one));
    let text = `Step ${step} takes ${us(longest.duration_us)} on rank ${longest.rank}`;
    if (blocked.size) {
      const most = (waits) => [...waits].reduce((one, other) => (other[1] > one[1] ? other : one));
      const [last, [waiter, wait]] = [...blocked]
        .map(([rank, waits]) => [rank, most(waits)])
        .reduce((one, other) => (other[1][1] > one[1][1] ? other : one));
      text += `; rank ${waiter} waits ${us(wait)} for rank ${last}`;
    } else if (ranks.length > 1) {
      const waits = ranks.map((rank) => [blockedUs(rank), rank.rank]).sort(([one], [other]) => one - other);
      const [[least_us, least], [most_us, most]] = [waits[0], waits[waits.length - 1]];
      if (most_us) text += `; rank ${most} has the longest comm wait, ${us(most_us)}`;
      if (most_us && least_us) text += `, rank ${least} the shortest, ${us(least_us)}`;
    }
    return `${text}.`;
  };

  // Why this step is shown, and how its times were laid on one line.
  torchlens.stepNotes = (trace, { step: wanted, steps, rank: chosen }) => {
    const text = [];
    if (wanted !== null && wanted !== trace.step) {
      text.push(`This page has no spans of step ${wanted}; the nearest step with spans is ${trace.step}.`);
    }
    if (wanted === null && steps && !(trace.step >= steps[0] && trace.step < steps[1])) {
      text.push("This page has no spans of the selected steps.");
    }
    if (chosen !== null && !trace.ranks.some(({ rank }) => rank === chosen)) {
      text.push(`This page has no spans of rank ${chosen} in this step.`);
    }
    text.push(`Shown because: ${short(trace.why, 80)}.`);
    if (trace.clock) text.push(short(trace.clock, 300));
    if (trace.ranks.some(({ offset_us }) => offset_us === null)) {
      text.push("* start not known, drawn at 0.");
    }
    if (trace.ranks_left_out) text.push(`${trace.ranks_left_out} other ranks are left out.`);
    return text.join(" ");
  };

  // Chooses among the steps that are there whole; on the live page it asks the server for any other.
  class StepPicker {
    constructor(page, chart) {
      this.page = page;
      this.chart = chart;
      this.fetched = new Map();
      this.missing = new Map(); // what was asked for and not recorded, by which version of the contents
      const set = (step) => page.view.set({ step });
      const { label, select } = torchlens.choice("Step", "recorded-step", [], (value) => set(Number(value)));
      this.select = select;
      this.before = torchlens.button("\u2039 Previous recorded step", () => this.next(-1));
      this.after = torchlens.button("Next recorded step \u203a", () => this.next(1));
      this.element = element("div", { className: "controls" }, label, this.before, this.after);
      if (page.isLive) {
        this.any = element("input", { type: "number", min: "0", name: "any-step", size: "8" });
        this.any.addEventListener("change", () => {
          if (this.any.value !== "") set(Number(this.any.value));
        });
        this.element.append(element("label", {}, "any step ", this.any));
      }
    }

    all() {
      const own = this.page.contents.traces.steps;
      const known = new Set(own.map(({ step }) => step));
      return [...own, ...[...this.fetched.values()].filter(({ step }) => !known.has(step))].sort(
        (one, other) => one.step - other.step,
      );
    }

    // What the view asks for: the chosen step or the nearest one; else the most telling one of the selected, or of all.
    async trace() {
      const { step: wanted, steps } = this.page.view.now;
      const own = this.page.contents.traces.steps;
      const isSelected = ({ step }) => step >= steps[0] && step < steps[1]; // the most telling ones come first
      if (wanted === null) return (steps && own.find(isSelected)) ?? own[0] ?? null;
      if (this.page.isLive) await this.ask(wanted);
      const near = (one, other) => (Math.abs(other.step - wanted) < Math.abs(one.step - wanted) ? other : one);
      return this.all().reduce((one, other) => (one ? near(one, other) : other), null);
    }

    async ask(step) {
      if (this.missing.get(step) === this.page.version || this.all().some((each) => each.step === step)) return;
      try {
        const answer = await (window.torchlensAsk ?? fetch)(`api/step/${step}`);
        if (!answer.ok) return;
        const {
          names,
          steps: [trace],
        } = await answer.json();
        if (!trace) {
          this.missing.set(step, this.page.version);
          return;
        }
        this.fetched.set(step, { ...trace, names });
      } catch {
        /* the server is gone: the nearest step that is here is shown, and the words say so */
      }
    }

    next(by) {
      const all = this.all();
      const { trace } = this.chart;
      const at = all.findIndex(({ step }) => step === trace?.step) + by;
      if (all[at]) this.page.view.set({ step: all[at].step });
    }

    show(trace) {
      const all = this.all();
      const at = all.findIndex(({ step }) => step === trace?.step);
      const from = Math.max(0, Math.min(at - MOST_OPTIONS / 2, all.length - MOST_OPTIONS));
      const shown = all.slice(from, from + MOST_OPTIONS);
      this.select.replaceChildren(
        ...shown.map(({ step, why }) => torchlens.option(step, `${step}: ${short(why, 60)}`)),
      );
      if (trace) this.select.value = String(trace.step);
      this.before.disabled = at <= 0;
      this.after.disabled = at < 0 || at === all.length - 1;
      if (this.any && document.activeElement !== this.any) this.any.value = trace?.step ?? "";
    }
  }

  // The tables of the step below its timeline.
  class StepTables {
    constructor(figure, chart) {
      this.figure = figure;
      this.chart = chart;
    }

    show(trace) {
      this.made?.remove();
      const shown = trace ?? this.chart.page.contents.traces.steps[0];
      this.made = element("div", {}, ...(shown.ranks.length > 1 ? [this.collectives(shown), this.ranks(shown)] : []));
      this.figure.after(this.made);
    }

    collectives({ step, collectives, ranks_left_out }) {
      const longest = ranks_left_out ? "longest wait of those shown" : "longest wait";
      if (!collectives.length) {
        return element("p", {
          className: "note",
          text: `No collective of step ${step} was joined over its ranks.`,
        });
      }
      const shown = collectives.slice(0, MOST_COLLECTIVES);
      const us = (value) => duration(value / 1e6);
      const rows = shown.map(({ name, group, number, bytes, last_rank, arrival_us, wait_us, asynchronous }) => {
        const known = (values) => Object.entries(values).filter(([, value]) => value !== null);
        const waits = known(wait_us);
        const arrivals = known(arrival_us).map(([, value]) => value);
        const [rank, wait] = waits.reduce((one, other) => (other[1] > one[1] ? other : one), [null, 0]);
        return [
          short(name),
          short(group, 24),
          String(number),
          bytes === null ? "-" : torchlens.amount(bytes, "B"),
          last_rank === null ? "not known" : String(last_rank),
          arrivals.length ? us(Math.max(...arrivals)) : "not known",
          wait > 0 ? `${us(wait)} (rank ${rank})` : "none",
          asynchronous ? "yes" : "no",
        ];
      });
      const headers = [
        "collective",
        "group",
        "number",
        "bytes",
        "last to arrive",
        "after the first rank",
        longest,
        "asynchronous",
      ];
      const which = shown.length < collectives.length ? `, ${shown.length} of ${collectives.length}` : "";
      return torchlens.table(
        `Collectives of step ${step} that were joined over its ranks, in the order of their ends${which}`,
        headers,
        rows,
        { texts: [0, 1], first: FIRST_COLLECTIVES },
      );
    }

    ranks({ step, ranks, collectives }) {
      const us = (value) => duration(value / 1e6);
      const rows = ranks.map(({ rank, offset_us, duration_us, rows: lanes }) => {
        const waits = collectives
          .filter(({ asynchronous }) => !asynchronous)
          .map(({ wait_us }) => wait_us[rank])
          .filter((wait) => typeof wait === "number");
        return [
          String(rank),
          offset_us === null ? "not known" : us(offset_us),
          us(duration_us),
          waits.length ? us(waits.reduce((sum, wait) => sum + wait, 0)) : "-",
          String(collectives.filter(({ last_rank }) => last_rank === rank).length),
          String(lanes.reduce((sum, { kind }) => sum + kind.length, 0)),
        ];
      });
      const headers = [
        "rank",
        "start after the first rank",
        "step",
        "wait in joined collectives",
        "last to arrive in",
        "spans",
      ];
      const made = element("details", {}, element("summary", { text: "The step as a table" }));
      made.append(torchlens.table(`Step ${step} by rank`, headers, rows, { texts: [] }));
      return made;
    }
  }

  Object.assign(torchlens, { StepPicker, StepTables });
}
