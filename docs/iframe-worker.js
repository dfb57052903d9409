/* A browser starts no worker for a page that was opened from a folder, and the search is a worker. There, its script
 * runs in a hidden frame, whose global object is its own as that of a worker is. Pages from a server keep theirs. */
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.inside = new Promise((resolve, reject) => {
        // Set before the frame is in the page: some browsers load an empty frame at once, some later.
        this.frame.onload = () => this.start(new URL(url, document.baseURI)).then(resolve, reject);
      });
      document.body.append(this.frame);
    }

    async start(url) {
      const inside = this.frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, url);
          script.onload = resolve;
          script.onerror = () => reject(new Error(`${script.src} cannot be loaded`));
          inside.document.body.append(script);
        });
      inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      inside.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address);
      };
      await load(url);
      return inside;
    }

    async postMessage(data) {
      const inside = await this.inside;
      inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
