// What is known of one stream: pure, no socket and no clock. docs/protocol.md has the rules.

const WAITS = [2, 4, 8]; // seconds for an answer to the first, second, third sending in a row
const GRACE = 60; // seconds for which a pool may tell us to come back

/** The end of a stream that is no completion. `code` is one of docs/protocol.md's. */
export class PoolError extends Error {
  constructor(code, message) {
    super(message);
    this.name = "PoolError";
    this.code = code;
  }
}

/** A stream's state; `due` is when it is sent (again), in seconds. */
export class State {
  attempt = 0;
  ids = []; // token ids that we have
  resume = null; // seed and facts, once accepted
  home = null; // boot and link that accepted the newest sending
  boot = null; // that accepted it last
  sendings = 0; // in a row that brought no id
  barrenBoots = 0; // brokers in a row that brought no id
  refusedAt = Infinity; // the first in a row of errors that told us to come back
  due = 0;
  cancelled = false;
  end = null; // {reason, usage, …} or a PoolError

  constructor(id, body) {
    this.id = id;
    this.body = body;
  }

  /** The body and the blobs of the next sending. */
  sending(now) {
    this.attempt += 1;
    this.sendings += 1;
    this.home = null;
    this.due = now + WAITS[Math.min(this.sendings, WAITS.length) - 1];
    if (this.resume === null) return [this.body, []];
    const counts = { count: this.ids.length, resumes: this.barrenBoots };
    return [{ ...this.body, resume: { ...this.resume, ...counts } }, [packed(this.ids)]];
  }

  /** Nothing more comes of the newest sending: send again, in a hurry only twice. */
  lost(now) {
    if (this.cancelled) return;
    this.due = Math.min(this.due, now + (this.sendings < 3 ? 0 : WAITS.at(-1)));
  }

  /** The broker lives at this boot and link: is our sending there? */
  heardOf(boot, link, now) {
    if (this.home !== null && (this.home[0] !== boot || this.home[1] !== link)) this.lost(now);
  }

  /** Take a frame about this stream; returns what its reader gets to see, or null. */
  take(kind, attempt, pos, body, blob, now) {
    if (this.end !== null || (attempt !== this.attempt && attempt !== 0)) return null;
    if (kind === "error") return this.#error(body, now);
    if (kind === "accepted") return this.#accepted(body);
    if (this.home === null || (kind !== "delta" && kind !== "done")) return null;
    if (pos !== this.ids.length) {
      this.lost(now); // a gap
      return null;
    }
    const ids = blob === undefined ? [] : unpacked(blob);
    this.ids.push(...ids);
    if (kind === "done") this.end = body;
    if (ids.length > 0) this.#moved(body.facts);
    return { text: body.text, ids, pos };
  }

  #accepted(body) {
    if (this.boot !== null && this.boot !== body.boot) {
      this.barrenBoots += 1;
      this.refusedAt = Infinity;
    }
    this.home = [body.boot, body.link];
    this.boot = body.boot;
    this.resume = { ...this.resume, seed: body.seed };
    this.due = Infinity;
    return null;
  }

  #moved(facts) {
    this.sendings = this.barrenBoots = 0;
    this.refusedAt = Infinity;
    if (facts && this.resume.facts === undefined) this.resume.facts = facts;
  }

  /** An error is the end, unless it tells a stream that was there before to come back. */
  #error(body, now) {
    const known = this.attempt > 1 || (body.code === "draining" && this.boot !== null);
    const wait = (body.retry_after_ms ?? 0) / 1000;
    this.refusedAt = Math.min(this.refusedAt, now);
    if (!known || !wait || this.cancelled || now + wait > this.refusedAt + GRACE) {
      this.end = new PoolError(body.code, body.message);
    } else {
      this.home = null;
      this.due = now + wait;
    }
    return null;
  }
}

/** Ids as they travel: little-endian, four bytes each. */
export function packed(ids) {
  const bytes = new DataView(new ArrayBuffer(4 * ids.length));
  ids.forEach((id, i) => bytes.setUint32(4 * i, id, true));
  return new Uint8Array(bytes.buffer);
}

/** The ids of a blob. */
export function unpacked(blob) {
  const bytes = new DataView(blob.buffer, blob.byteOffset, blob.byteLength);
  return Array.from({ length: blob.byteLength / 4 }, (_, i) => bytes.getUint32(4 * i, true));
}
