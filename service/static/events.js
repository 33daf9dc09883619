// Follows GET /events. Not by an EventSource, which cannot send a token.

const FIRST_WAIT_SECONDS = 1;
const LONGEST_WAIT_SECONDS = 5;
const SILENCE_SECONDS = 45; // the service shows every 15 s that it is there

export class Stream {
  // heard: takes the name of an event and its data. live, lost, refused (takes the service's ApiError): called when it becomes so;
  // after the latter two the next try follows by itself.
  constructor(api, { heard, live, lost, refused }) {
    this.api = api;
    this.on = { heard, live, lost, refused };
    this.lastId = null;
  }

  async follow() {
    let wait = FIRST_WAIT_SECONDS;
    for (;;) {
      try {
        await this.#once(() => {
          wait = FIRST_WAIT_SECONDS;
        });
      } catch (error) {
        if (error.status) this.on.refused(error);
        else this.on.lost();
        if (error.status === 401) return;
      }
      await new Promise((resume) => setTimeout(resume, 1000 * wait));
      wait = Math.min(2 * wait, LONGEST_WAIT_SECONDS);
    }
  }

  async #once(opened) {
    const silent = new AbortController();
    const headers = this.lastId === null ? {} : { "Last-Event-ID": this.lastId };
    const response = await this.api.open("/events", { headers, signal: silent.signal });
    opened();
    this.on.live();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const timer = setTimeout(() => silent.abort(), 1000 * SILENCE_SECONDS);
      const { value, done } = await reader.read().finally(() => clearTimeout(timer));
      if (done) throw new Error("the service ended the stream");
      const messages = (text + value).split("\n\n");
      text = messages.pop();
      messages.forEach((message) => this.#take(message));
    }
  }

  #take(message) {
    const fields = new Map();
    for (const line of message.split("\n")) {
      const colon = line.indexOf(": ");
      if (colon > 0) fields.set(line.slice(0, colon), line.slice(colon + 2));
    }
    if (fields.has("id")) this.lastId = fields.get("id");
    if (fields.has("event")) this.on.heard(fields.get("event"), JSON.parse(fields.get("data")));
  }
}
