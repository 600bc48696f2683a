/* plan_json.c: stub. */
typedef int stub_plan_json;
