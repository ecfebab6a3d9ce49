/** The shelf, fetched page by page while it is scrolled: a large shelf is never fetched or drawn as a whole. */

import { listCaches } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./vendor/hooks.js";

const PAGE = 200;
const LARGEST_PAGE = 1000;
const NOTHING = { rows: [], more: true, loading: false, failure: null };

/**
 * The caches that match `query`, newest first: `{rows, more, loading, failure, loadMore, refresh, replace, remove}`.
 * `loadMore` fetches the next page, unless one is being fetched. `whole`: fetch all pages, one after the other.
 */
export function useCaches(query, whole) {
  const [state, setState] = useState(NOTHING);
  const current = useRef({ stop: new AbortController(), rows: [], more: false }); // until the first `refresh`
  const wanted = JSON.stringify(query);
  const limit = useRef();
  limit.current = whole ? LARGEST_PAGE : PAGE;

  const loadMore = useCallback(async () => {
    const run = current.current;
    if (run.busy || !run.more) return;
    run.busy = true;
    setState((before) => ({ ...before, loading: true, failure: null }));
    try {
      const after = run.last;
      const asked = { ...JSON.parse(wanted), limit: limit.current, after };
      const page = await listCaches(asked, { signal: run.stop.signal });
      Object.assign(run, {
        rows: [...run.rows, ...page.data],
        more: page.has_more,
        last: page.last_id ?? after,
        busy: false,
      });
      setState({ rows: run.rows, more: run.more, loading: false, failure: null });
    } catch (failure) {
      if (run.stop.signal.aborted) return;
      Object.assign(run, { busy: false, more: false });
      setState((before) => ({ ...before, more: false, loading: false, failure }));
    }
  }, [wanted]);

  const refresh = useCallback(() => {
    current.current.stop.abort();
    current.current = { stop: new AbortController(), busy: false, rows: [], more: true };
    return loadMore();
  }, [loadMore]);

  useEffect(() => {
    refresh();
    return () => current.current.stop.abort();
  }, [refresh]);

  useEffect(() => {
    if (whole && state.more && !state.loading) loadMore();
  }, [whole, state, loadMore]);

  const change = (edit) => {
    current.current.rows = edit(current.current.rows);
    setState((before) => ({ ...before, rows: current.current.rows }));
  };
  const replace = (cache) => change((rows) => rows.map((row) => (row.id === cache.id ? cache : row)));
  const remove = (id) => change((rows) => rows.filter((row) => row.id !== id));
  const loadBehind = () => {
    if (state.rows === current.current.rows) loadMore(); // a page that has come and is not drawn yet is not the last one
  };
  return { ...state, loadMore: loadBehind, refresh, replace, remove };
}
