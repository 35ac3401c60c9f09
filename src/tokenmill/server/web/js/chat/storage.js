// The browser's copy of conversations, in IndexedDB; tabs tell one another what they have changed.

import { merged } from "./tree.js";

const NAME = "tokenmill";
const STORE = "conversations";
const tabs = new BroadcastChannel(NAME);

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, operation) {
  const transaction = (await database()).transaction(STORE, mode);
  const request = operation(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export const loadAll = () => run("readonly", (store) => store.getAll());
export const load = (id) => run("readonly", (store) => store.get(id));

/** Store it, beside whatever another tab has added to it. */
export async function save(conversation) {
  await run("readwrite", (store) => {
    const reading = store.get(conversation.id);
    reading.onsuccess = () => store.put(merged(conversation, reading.result));
    return reading;
  });
  tabs.postMessage(conversation.id);
}

export async function erase(id) {
  await run("readwrite", (store) => store.delete(id));
  tabs.postMessage(id);
}

/** Be told of conversations that another tab has changed or erased. */
export function onOtherTabs(listener) {
  tabs.onmessage = ({ data }) => listener(data);
}
