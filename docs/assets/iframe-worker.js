// Lets the search work when the site is read from disk: browsers start no worker from a file, so an
// iframe does what the worker would do. It has the name that Material's search script looks for.
// Material's offline plugin would fetch such a script from another host.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = []; // messages from before the script has been loaded
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inner = frame.contentWindow;
      this.inner.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const page = this.inner.document;
      page.open();
      page.write("<!doctype html><body></body>");
      page.close();
      this.inner.postMessage = (data) => this.inner.answer(data);
      this.inner.importScripts = (...scripts) =>
        scripts.reduce((before, src) => before.then(() => this.load(src)), Promise.resolve());
      this.ready = this.load(new URL(url, document.baseURI).href).then(() => {
        this.loaded = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    load(src) {
      return new Promise((done, failed) => {
        const script = this.inner.document.createElement("script");
        Object.assign(script, { src, onload: done, onerror: failed });
        this.inner.document.body.appendChild(script);
      });
    }
    postMessage(data) {
      if (this.loaded) this.inner.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
