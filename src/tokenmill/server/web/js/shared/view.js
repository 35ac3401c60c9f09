// The view library, under one name.
export {
  html, render, createContext, useCallback, useContext, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "../../vendor/htm-preact.js";
