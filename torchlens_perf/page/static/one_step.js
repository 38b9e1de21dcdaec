// Chooses the step that the timeline shows, and describes it in words and tables.
{
  const { duration, short, element } = torchlens;
  const MOST_COLLECTIVES = 24;
  const FIRST_COLLECTIVES = 8;
  const MOST_OPTIONS = 80;
  const us = (value) => (typeof value === "number" ? duration(value / 1e6) : "not known");
  const most = (values) => values.reduce((one, other) => (one === null || other > one ? other : one), null);

  // Returns the time that a rank was blocked in waits on its training thread.
  function blockedUs({ rows }) {
    const host = rows.filter(({ lane }) => lane === "host");
    const waits = host.flatMap(({ kind, duration_us }) => duration_us.filter((_, at) => kind[at] === "wait"));
    return waits.reduce((sum, wait) => sum + wait, 0);
  }

  // Returns a sentence on the duration of the step and the longest wait for another rank.
  torchlens.stepFinding = ({ step, ranks, collectives }) => {
    // The blocked time by the rank that arrived last.
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
      const pairs = [...blocked].flatMap(([last, waits]) => [...waits].map(([waiter, wait]) => [wait, waiter, last]));
      const [wait, waiter, last] = pairs.reduce((one, other) => (other[0] > one[0] ? other : one));
      text += `; rank ${waiter} waits ${us(wait)} for rank ${last}`;
    } else if (ranks.length > 1) {
      const waits = ranks.map((rank) => [blockedUs(rank), rank.rank]).sort(([one], [other]) => one - other);
      const [[least_us, least], [most_us, most]] = [waits[0], waits[waits.length - 1]];
      if (most_us) text += `; rank ${most} waits ${us(most_us)} in collectives, rank ${least} ${us(least_us)}`;
    }
    return `${text}.`;
  };

  // Returns the reason for showing this step, and the alignment of its clocks.
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
    if (trace.clock) text.push(short(trace.clock, 300));
    if (trace.ranks.some(({ offset_us }) => offset_us === null)) {
      text.push("* start not known, drawn at 0.");
    }
    if (trace.ranks_left_out) text.push(`${trace.ranks_left_out} other ranks are left out.`);
    return text.join(" ");
  };

  // Lets the user choose among the steps in the page. The live page requests other steps from the server.
  class StepPicker {
    constructor(page, chart) {
      this.page = page;
      this.chart = chart;
      this.fetched = new Map();
      // Requested steps that were not recorded, with the version of the contents at that time.
      this.missing = new Map();
      const set = (step) => page.view.set({ step });
      this.choice = torchlens.choice("Step", "recorded-step", (value) => set(Number(value)));
      this.before = torchlens.button("\u2039 Previous", () => this.next(-1), { title: "Previous recorded step" });
      this.after = torchlens.button("Next \u203a", () => this.next(1), { title: "Next recorded step" });
      this.element = element("div", { className: "controls" }, this.choice.label, this.before, this.after);
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

    // Returns the chosen step or the nearest one. Without a chosen step, returns the most informative selected step, or
    // the most informative one of all.
    async trace() {
      const { step: wanted, steps } = this.page.view.now;
      const own = this.page.contents.traces.steps;
      // Steps are sorted by how informative they are, so the first match is the best one.
      const isSelected = ({ step }) => step >= steps[0] && step < steps[1];
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
        const { names, steps } = await answer.json();
        if (steps.length) this.fetched.set(step, { ...steps[0], names });
        else this.missing.set(step, this.page.version);
      } catch {
        // The server cannot be reached. The nearest step in the page is shown, with a note.
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
      const options = shown.map(({ step, why }) => [step, `${step}: ${short(why, 60)}`]);
      this.choice.show(options, trace?.step);
      this.before.disabled = at <= 0;
      this.after.disabled = at < 0 || at === all.length - 1;
      if (this.any && document.activeElement !== this.any) this.any.value = trace?.step ?? "";
    }
  }

  // Returns the table below the timeline of a step of several ranks.
  torchlens.stepTable = ({ step, ranks, collectives, ranks_left_out }) => {
    if (ranks.length < 2) return element("div");
    if (!collectives.length) {
      return element("p", { className: "note", text: `No collective of step ${step} was joined over its ranks.` });
    }
    const shown = collectives.slice(0, MOST_COLLECTIVES);
    const which = shown.length < collectives.length ? `, ${shown.length} of ${collectives.length}` : "";
    const title = `Collectives of step ${step} that were joined over its ranks, in the order of their ends${which}`;
    const longest = ({ wait_us }) => {
      const wait = most(Object.values(wait_us));
      return wait > 0 ? `${us(wait)} (rank ${Object.keys(wait_us).find((rank) => wait_us[rank] === wait)})` : "none";
    };
    const columns = [
      ["collective", ({ name }) => short(name), "text"],
      ["group", ({ group }) => short(group, 24), "text"],
      ["number", ({ number }) => number],
      ["bytes", ({ bytes }) => (bytes === null ? "-" : torchlens.amount(bytes, "B"))],
      ["last to arrive", ({ last_rank }) => last_rank ?? "not known"],
      ["after the first rank", ({ arrival_us }) => us(most(Object.values(arrival_us)))],
      [ranks_left_out ? "longest wait of those shown" : "longest wait", longest],
      ["asynchronous", ({ asynchronous }) => (asynchronous ? "yes" : "no")],
    ];
    return torchlens.table(title, shown, columns, { first: FIRST_COLLECTIVES });
  };

  Object.assign(torchlens, { StepPicker, us, most });
}
