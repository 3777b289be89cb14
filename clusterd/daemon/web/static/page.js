// The pages of clusterd: the rows of /api as tables. Text of jobs and hosts is only ever set as text, never as HTML.
"use strict";

const EVERY_MS = 3000;
const SLOW_MS = 15000; // between looks at the metrics and the history of a job
const STEPS_WHOLE = 5000; // a job of more steps is drawn from the newest STEPS_BYTES of its log
const STEPS_BYTES = 400000;
const HISTORY_ROWS = 2000;

class Failure extends Error {}

async function ask(path) {
  const answer = await fetch("/api/" + path, {headers: {Accept: "application/json"}});
  const value = await answer.json();
  if (!answer.ok) throw new Failure(value.error || answer.statusText);
  return value;
}

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "polyline", "line", "rect", "text", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children.flat().filter(child => child !== null && child !== ""));
  return made;
}

const number = (value, digits = 4) => value === null || value === undefined ? "" : String(Number(value.toPrecision(digits)));

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${String(whole % 60).padStart(2, "0")}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${String(Math.floor(whole / 60) % 60).padStart(2, "0")}m`;
  return `${Math.floor(whole / 86400)}d${Math.floor(whole / 3600) % 24}h`;
}

// ISO date and time of this browser's zone.
const clock = seconds => new Date((seconds - new Date(seconds * 1000).getTimezoneOffset() * 60) * 1000).toISOString().slice(0, 19).replace("T", " ");
const expected = (job, what) => {
  const times = job.forecast && job.forecast[what];
  if (!times) return job.state === "queued" ? "not known" : "";
  const ends = times.p5_s !== null && times.p95_s !== null && times.p5_s !== times.p95_s ? `, between ${clock(times.p5_s)} and ${clock(times.p95_s)}` : "";
  return clock(times.p50_s) + ends + (what === "start" && job.forecast.after ? `; after ${job.forecast.after} ends or shrinks` : "");
};
const size = bytes => bytes === null || bytes === undefined ? "" : `${number(bytes / 2 ** 30, 3)} GiB`;
const jobLink = (id, text) => element("a", {href: "/jobs/" + encodeURIComponent(id)}, text || id);

function table(columns, rows) {
  const head = columns.map(([title, , kind]) => element("th", {class: kind || null}, title));
  const body = rows.map(row => element("tr", {}, columns.map(([title, cell, kind]) => element("td", {class: kind || null, "data-heading": title}, cell(row)))));
  return element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
}

function progress(job) {
  if (!job.steps) return job.step ? String(job.step) : "";
  const bar = element("progress", {max: job.steps, value: job.step || 0});
  return element("span", {title: `step ${job.step || 0} of ${job.steps}`}, bar, ` ${job.step || 0}/${job.steps}`);
}

// Polyline of values over a box of 1000 x 100 units; points without a value are left out.
function line(points, least, most) {
  const first = points.length ? points[0][0] : 0;
  const width = points.length ? points[points.length - 1][0] - first || 1 : 1;
  const places = points.map(([x, y]) => `${((x - first) / width * 1000).toFixed(1)},${(97 - (y - least) / (most - least || 1) * 94).toFixed(1)}`);
  return element("polyline", {points: places.join(" "), fill: "none", stroke: "currentColor", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke"});
}

// Dashed lines where the job moved, over the steps of a chart; the title of each says to which plan.
function marks(points, moves) {
  const first = points[0][0], width = points[points.length - 1][0] - first || 1;
  return moves.filter(move => move.step >= first && move.step <= first + width).map(move => {
    const x = ((move.step - first) / width * 1000).toFixed(1);
    return element("line", {class: "move", x1: x, x2: x, y1: 0, y2: 100, "vector-effect": "non-scaling-stroke"}, element("title", {}, `step ${move.step}: ${move.from} to ${move.to}`));
  });
}

function chart(title, points, moves) {
  const values = points.map(([, y]) => y);
  const least = values.reduce((a, b) => Math.min(a, b)), most = values.reduce((a, b) => Math.max(a, b));
  const drawn = element("svg", {class: "chart", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": title}, line(points, least, most), marks(points, moves));
  const range = `${number(least)} to ${number(most)}, steps ${points[0][0]} to ${points[points.length - 1][0]}, last ${number(values[values.length - 1])}`;
  return element("figure", {}, element("figcaption", {}, title, element("span", {class: "dim"}, ` ${range}`)), drawn);
}

// Values of each metric by step, from the lines of a job's step log; a restart drops the steps that it repeats.
function series(text) {
  const found = new Map();
  const add = (name, step, value) => {
    if (typeof value !== "number") return;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push([step, value]);
  };
  for (const written of text.split("\n")) {
    let row;
    try { row = JSON.parse(written); } catch { continue; } // the first line may be cut, the last one incomplete
    if (row.restart_from !== undefined) for (const points of found.values()) while (points.length && points[points.length - 1][0] > row.restart_from) points.pop();
    if (row.step !== undefined) { add("loss", row.step, row.loss); add("step time (s)", row.step, row.time_s); }
    const at = row.evaluated !== undefined ? row.evaluated : row.logged;
    if (at !== undefined) for (const [name, value] of Object.entries(row.metrics || {})) add(name, at, value);
  }
  return found;
}

const STATES = ["running", "starting", "stopping", "queued", "failed", "cancelled", "finished"];

// One row for the listed tasks of an array or sweep, in the place of the first.
function folded(jobs) {
  const arrays = Map.groupBy(jobs.filter(job => job.array), job => job.array.id);
  return jobs.flatMap(job => {
    const runs = job.array ? arrays.get(job.array.id) : [];
    const tasks = [...new Map(runs.map(run => [run.array.index, run])).values()];  // of one that ran again, the newest
    if (tasks.length < 2) return [job];
    if (runs[0] !== job) return [];
    const counts = STATES.map(state => [state, tasks.filter(task => task.state === state).length]).filter(([, count]) => count);
    return [{...job, array_id: job.array.id, id: `${job.array.id}_*`, name: job.array.name, state: counts[0][0], loss: null, left_s: null, ends_by_s: null,
      devices: tasks.flatMap(task => task.holds_devices ? task.devices : []), hosts: [],
      asked: tasks.reduce((sum, task) => sum + task.asked, 0), cores: tasks.reduce((sum, task) => sum + task.cores, 0),
      step: tasks.filter(task => task.ended_s !== null).length, steps: tasks.length,
      reason: `${tasks.length} tasks: ${counts.map(([state, count]) => `${count} ${state}`).join(", ")}`}];
  });
}

// Time to the end as expected, else at this speed, else to the time limit.
const expectedLeft = job => job.state === "running" && job.left_s !== null && job.forecast && job.forecast.end ? job.forecast.end.p50_s - Date.now() / 1000 : 0;
const left = job => expectedLeft(job) > 0 ? duration(expectedLeft(job)) : job.left_s === null && job.ends_by_s ? `<${duration(Math.max(job.ends_by_s - Date.now() / 1000, 0))}` : duration(job.left_s);

const queueLink = (job, text) => job.array_id ? element("a", {href: `/?all&array=${encodeURIComponent(job.array_id)}`}, text) : jobLink(job.id, text);

const now = () => Date.now() / 1000;
const elapsed = job => job.started_s ? duration((job.ended_s || now()) - job.started_s) : "";

// Devices by host: "gpu01: 0 1 2, gpu02: 0".
function placement(devices) {
  const hosts = Map.groupBy(devices, id => id.slice(0, id.lastIndexOf(":")));
  return [...hosts].map(([host, ids]) => `${host}: ${ids.map(id => id.slice(id.lastIndexOf(":") + 1)).join(" ")}`).join(", ");
}

const wanted = job => job.asked ? String(job.asked) : `${job.cores} core${job.cores === 1 ? "" : "s"}`;

async function queue() {
  const asked = new URLSearchParams(location.search), all = asked.has("all"), array = asked.get("array");
  const listed = await ask(all ? "jobs?all=true" : "jobs");
  const jobs = array === null ? folded(listed) : listed.filter(job => job.array && job.array.id === array);
  const columns = [
    ["job", job => queueLink(job, job.id)],
    ["name", job => queueLink(job, job.name)],
    ["user", job => job.user, "narrow-not"],
    ["state", job => element("span", {class: job.state}, job.state)],
    ["place", job => job.place ? String(job.place) : "", "number narrow-not"],
    ["devices", job => job.devices.length ? `${job.devices.length} of ${job.asked}` : wanted(job), "number"],
    ["on", job => placement(job.devices) || job.hosts.join(", "), "wide"],
    ["step", progress],
    ["loss", job => number(job.loss), "number wide"],
    ["age", job => duration(now() - job.submitted_s), "number narrow-not"],
    ["elapsed", elapsed, "number narrow-not"],
    ["left", left, "number narrow-not"],
    ["expected start", job => job.state === "queued" && job.forecast && job.forecast.start ? clock(job.forecast.start.p50_s).slice(0, 16) : "", "number narrow-not"],
    ["why", job => job.reason, "why"],
  ];
  const heading = element("h1", {}, array !== null ? `Tasks of ${array}` : all ? "All jobs" : "Queue");
  const other = element("p", {}, element("a", {href: all ? "/" : "/?all"}, all ? "only jobs that are not over" : "also jobs that are over"));
  return [heading, jobs.length ? table(columns, all ? jobs.reverse() : jobs) : element("p", {}, "No job waits or runs."), other];
}

function device(row, minutes, now_s) {
  const state = row.job !== null ? "leased" : row.foreign ? "foreign" : "free";
  const last = minutes[minutes.length - 1];
  const points = minutes.filter(minute => minute.busy !== null).map(minute => [minute.minute, minute.busy]);
  const use = last && last.busy !== null ? `${Math.round(last.busy * 100)} % busy` : "";
  const memory = row.memory_bytes ? `${last && last.memory_bytes !== null ? size(last.memory_bytes) + " of " : ""}${size(row.memory_bytes)}` : "";
  const title = element("title", {}, "use over the last hour");
  const spark = points.length > 1 ? element("svg", {class: "spark", viewBox: "0 0 1000 100", preserveAspectRatio: "none"}, title, line(points, 0, 1)) : null;
  return element("div", {class: `device ${state}`},
    element("div", {}, row.id.split(":").pop(), " ", row.job !== null ? jobLink(row.job, row.job_name) : row.foreign ? `used by others: ${row.foreign}` : "free"),
    element("div", {class: "dim"}, [row.name, memory, use].filter(Boolean).join(", ")), spark);
}

async function fleet() {
  const [hosts, usage] = await Promise.all([ask("hosts"), ask("usage?minutes=60")]);
  const devices = hosts.flatMap(host => host.devices);
  const leased = devices.filter(one => one.job !== null).length;
  const parts = [element("h1", {}, "Fleet"), element("p", {}, `${hosts.length} hosts, ${leased} of ${devices.length} devices leased`)];
  for (const host of hosts) {
    const facts = [host.drained ? `drained: ${host.drained}` : "", host.why, host.cpu_cores ? `${host.cores_used} of ${host.cpu_cores} cores` : "",
      host.memory_bytes ? `${size(host.memory_used_bytes)} of ${size(host.memory_bytes)} booked` : "", host.labels.join(" ")];
    const claims = host.claims.map(claim => element("p", {class: "dim"}, `${claim.owner ? "booking" : "claim"} ${claim.id}: ${[claim.devices.join(", "), claim.reason].filter(Boolean).join(": ")} (${claim.by})`));
    parts.push(element("section", {class: "host"}, element("h2", {}, host.name, " ", element("span", {class: host.state}, host.state)),
      element("p", {class: "dim"}, facts.filter(Boolean).join(", ")), claims,
      element("div", {class: "devices"}, host.devices.map(one => device(one, usage.devices[one.id] || [])))));
  }
  return parts;
}

// Who is expected where, for the next week.
async function calendar() {
  const entries = await ask("calendar?days=7"), now_s = Date.now() / 1000;
  const columns = [
    ["host", row => row.host || "not known yet"],
    ["from", row => row.from_s <= now_s ? "now" : clock(row.from_s)],
    ["until", row => row.until_s === null ? "" : clock(row.until_s)],
    ["devices", row => row.devices.map(one => one.split(":").pop()).join(", ")],
    ["user", row => row.user],
    ["what", row => row.job ? jobLink(row.job, row.text) : row.text, "why"],
  ];
  return [element("h1", {}, "Calendar"), entries.length ? table(columns, entries) : element("p", {}, "Nothing is expected.")];
}

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
const REPORT_DAYS = 14;
const colour = index => COLOURS[Math.min(index, COLOURS.length - 1)];
const key = (name, index) => element("span", {}, element("svg", {class: "key", viewBox: "0 0 1 1"}, element("rect", {width: 1, height: 1, fill: colour(index)})), name);

// One bar of parts [value, title] beside each other, over a whole.
function bar(parts, whole) {
  let from = 0;
  const drawn = parts.map(([value, title, fill], index) => {
    const made = element("rect", {x: from, width: value / (whole || 1) * 1000, y: 0, height: 100, fill: fill || colour(index)}, element("title", {}, title));
    from += value / (whole || 1) * 1000;
    return made;
  });
  return element("svg", {class: "bar", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": parts.map(([, title]) => title).join("; ")}, drawn);
}

async function past() {
  const since = `since_s=${Math.floor(now() - (REPORT_DAYS - 1) * 86400)}`;
  const [users, hosts, story] = await Promise.all([ask(`report?${since}`), ask(`report?${since}&by=host`), ask("history?limit=200")]);
  const days = [...new Set(users.flatMap(row => Object.keys(row.device_hours_by_day)))].sort().reverse();
  const hours = (row, day) => row.device_hours_by_day[day] || 0, sum = values => values.reduce((a, b) => a + b, 0);
  const most = Math.max(...days.map(day => sum(users.map(row => hours(row, day)))), 0);
  const longest = Math.max(...users.map(row => row.waited_s_longest || 0), 1);
  const said = [...story.events, ...story.decisions].filter(row => !row.routine && row.text).sort((a, b) => b.at_s - a.at_s);
  return [element("h1", {}, `Use of the last ${REPORT_DAYS} days`),
    element("h2", {}, "Device-hours by day"), element("p", {class: "dim"}, users.map((row, index) => key(row.group, index))),
    table([["day", day => day], ["device-hours", day => number(sum(users.map(row => hours(row, day))), 3), "number"],
      ["", day => bar(users.map(row => [hours(row, day), `${row.group} ${number(hours(row, day), 3)} h`]), most)]], days),
    element("h2", {}, "Busy and idle"), element("p", {class: "dim"}, ["worked", "held, not working"].map(key), " (grey: held by no job)"),
    table([["host", row => row.group], ["held", row => `${number(row.device_hours, 3)} h`, "number"], ["idle", row => `${number(row.idle_device_hours, 3)} h`, "number"],
      ["", row => {
        const worked = row.device_hours * (row.utilisation || 0), whole = row.device_hours + row.idle_device_hours;
        return bar([[worked, `worked ${number(worked, 3)} h`], [row.device_hours - worked, `held, not working ${number(row.device_hours - worked, 3)} h`],
          [row.idle_device_hours, `held by no job ${number(row.idle_device_hours, 3)} h`, "none"]], whole);
      }]], hosts),
    element("h2", {}, "Waiting times"), element("p", {class: "dim"}, ["median", "longest"].map(key)),
    table([["user", row => row.group], ["submitted", row => String(row.submitted), "number"], ["median", row => duration(row.waited_s_median), "number"],
      ["longest", row => duration(row.waited_s_longest), "number"],
      ["", row => bar([[row.waited_s_median || 0, "median"], [(row.waited_s_longest || 0) - (row.waited_s_median || 0), "longest"]], longest)]], users),
    element("h2", {}, "History"),
    element("ol", {class: "story"}, said.map(row => element("li", {}, element("time", {}, clock(row.at_s)), " ", row.job ? jobLink(row.job) : row.host || "", " ", row.text)))];
}

// Sentences about a job that waits: who is ahead, who holds what it needs and for how long, and where it does not fit.
async function waiting(job) {
  const answer = await ask(`jobs/${encodeURIComponent(job.id)}/why`);
  const until = name => answer.holders_left_s[name] !== undefined ? `, for about ${duration(answer.holders_left_s[name])} more`
    : answer.holders_most_s[name] !== undefined ? `, for at most ${duration(answer.holders_most_s[name])} more` : "";
  const some = (count, noun) => count ? `${count} ${noun}${count === 1 ? "" : "s"}` : "";
  const cores = answer.core_holders || {}, names = Object.keys({...answer.holders, ...cores}).filter(name => answer.holders[name] || cores[name]);
  const holders = names.map(name => `${name} holds ${[some(answer.holders[name], "device"), some(cores[name], "CPU core")].filter(Boolean).join(" and ")}${until(name)}`);
  const told = [answer.ahead.length ? `${answer.ahead.length} ahead in the queue: ${answer.ahead.slice(0, 5).join(", ")}` : "",
    answer.after ? `${answer.after.name} comes just before it, because ${answer.after.why}` : "",
    ...holders, ...answer.misfits, ...answer.unusable];
  return [element("h2", {}, "Waits for"), element("ul", {}, told.filter(Boolean).map(text => element("li", {}, text)))];
}

async function charts(job) {
  let steps;
  const part = job.step > STEPS_WHOLE ? `?last_bytes=${STEPS_BYTES}` : "";
  try { steps = await ask(`jobs/${encodeURIComponent(job.id)}/steps${part}`); } catch (error) {
    if (error instanceof Failure) return [element("p", {class: "dim"}, error.message)];
    throw error;
  }
  const drawn = [...series(steps.data)].filter(([, points]) => points.length > 1).map(([name, points]) => chart(name, points, job.migrations.filter(move => !move.failure)));
  return drawn.length ? [element("div", {class: "charts"}, drawn)] : [element("p", {class: "dim"}, "No metrics yet.")];
}

let slow = {at: -Infinity};

async function page(name) {
  const job = await ask(`jobs/${encodeURIComponent(name)}`);
  if (performance.now() - slow.at > SLOW_MS || slow.state !== job.state) {
    const [past, drawn] = await Promise.all([ask(`history?limit=${HISTORY_ROWS}`), charts(job)]);
    slow = {at: performance.now(), state: job.state, past, drawn};
  }
  const {past, drawn} = slow;
  const rows = [...past.events, ...past.decisions].filter(row => row.job === job.id && !row.routine && row.text);
  rows.sort((a, b) => a.at_s - b.at_s || ("cause" in a) - ("cause" in b));
  const facts = [["state", element("span", {class: job.state}, job.state)], ["why", job.reason], ["user", job.user], ["kind", job.kind],
    ["command", job.command ? element("code", {}, job.command) : ""],
    ["devices", placement(job.devices) || `asks for ${wanted(job)}`], ["hosts", job.devices.length ? "" : job.hosts.join(", ")], ["plan", job.plan], ["step", progress(job)], ["loss", number(job.loss)],
    ["step time", job.step_time_s ? `${number(job.step_time_s)} s` : ""], ["time left", left(job)], ["submitted", `${clock(job.submitted_s)}, ${duration(now() - job.submitted_s)} ago`], ["elapsed", elapsed(job)],
    ["expected start", job.state === "queued" ? expected(job, "start") : ""], ["expected end", job.ended_s ? "" : expected(job, "end")],
    ["started", job.started_s ? clock(job.started_s) : ""], ["ended", job.ended_s ? clock(job.ended_s) : ""], ["exit code", job.exit_code === null ? "" : String(job.exit_code)]];
  const shown = facts.filter(([, value]) => value).flatMap(([title, value]) => [element("dt", {}, title), element("dd", {}, value)]);
  const attempts = [["attempt", one => String(one.number)], ["state", one => one.state], ["plan", one => one.plan || ""],
    ["hosts", one => [...new Set(one.ranks.map(rank => rank.host))].join(", ")], ["started", one => one.started_s ? clock(one.started_s) : ""],
    ["ended", one => one.ended_s ? clock(one.ended_s) : ""], ["why", one => one.why, "why"]];
  const moves = [["to", one => one.to], ["started", one => clock(one.started_s)], ["downtime", one => one.downtime_s === null ? "" : `${number(one.downtime_s, 2)} s`, "number"],
    ["why", one => one.failure || one.reason, "why"]];
  const story = rows.map(row => element("li", {}, element("time", {}, clock(row.at_s)), " ", row.text));
  return [element("h1", {}, `${job.name} (${job.id})`), element("dl", {}, shown), ...(job.state === "queued" ? await waiting(job) : []), element("h2", {}, "Metrics"), ...drawn,
    element("h2", {}, "Story"), story.length ? element("ol", {class: "story"}, story) : element("p", {class: "dim"}, "Nothing recent."),
    ...(job.migrations.length ? [element("h2", {}, "Moves"), table(moves, job.migrations)] : []),
    ...(job.attempts.length ? [element("h2", {}, "Attempts"), table(attempts, job.attempts)] : [])];
}

function chosen() {
  const parts = location.pathname.split("/").filter(Boolean);
  if (parts[0] === "jobs") return () => page(decodeURIComponent(parts[1]));
  return {fleet, calendar, history: past}[parts[0]] || queue;
}

async function summary() {
  const status = await ask("status");
  const jobs = ["running", "queued"].map(state => `${status.jobs[state] || 0} ${state}`).join(", ");
  return `${jobs}; ${status.leased} of ${status.devices} devices leased; clusterd ${status.version}`;
}

async function refresh() {
  const trouble = document.getElementById("trouble");
  try {
    const [content, text] = await Promise.all([chosen()(), summary()]);
    document.getElementById("content").replaceChildren(...content);
    document.getElementById("summary").textContent = text;
    trouble.hidden = true;
  } catch (error) {
    trouble.textContent = error instanceof Failure ? error.message : `The daemon does not answer: ${error.message}`;
    trouble.hidden = false;
  }
}

async function run() {
  for (const link of document.querySelectorAll("nav a")) if (link.getAttribute("href") === location.pathname) link.className = "here";
  for (;;) {
    if (!document.hidden && getSelection().isCollapsed) await refresh(); // text that is selected to be copied stays
    await new Promise(done => setTimeout(done, EVERY_MS));
  }
}

run();
