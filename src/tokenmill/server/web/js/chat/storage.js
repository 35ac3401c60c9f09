// The browser's copy of conversations, in IndexedDB.

const NAME = "tokenmill";
const STORE = "conversations";

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
export const save = (conversation) => run("readwrite", (store) => store.put(conversation));
export const erase = (id) => run("readwrite", (store) => store.delete(id));
